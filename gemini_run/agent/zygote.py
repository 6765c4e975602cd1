"""Starting workers: forked from a pre-imported process where that is safe, else plainly."""

from __future__ import annotations

import array
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gemini_run.agent.process import Guard, WorkerProcess, reap_adopted
from gemini_run.wire import ENV_BOOT, ENV_WORKER

BOOT_FOLDER = Path(__file__).parent / "boot"
BOOTSTRAP = "gemini_run.worker.bootstrap"  #: named, not imported: agent and worker code stay apart

#: What may differ between the zygote's environment and a worker's: set anew in each round, and read by no library
#: while it is imported. Any other difference means that the imports might have come out differently.
PER_ROUND = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_TIMER_FILE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "CUDA_VISIBLE_DEVICES",
        "GEMINI_RESTART_GENERATION",
        ENV_WORKER,
    }
)

_IMPORT_SECONDS = 60.0  #: a zygote that is not ready after so long is given up
_FORK_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class StartRequest:
    """One worker to start: command, whole environment, and files for its streams (None = the agent's own)."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    stdout: IO[Any] | None
    stderr: IO[Any] | None


class ZygoteUnfit(Exception):
    """This worker cannot come from the zygote; the message says why. It is started plainly instead."""


def is_plain_python(args: Sequence[str]) -> bool:
    """Whether the command is torchrun's default: this interpreter on a script or a module. Only then is it sure
    that the boot hook runs before the script."""
    return len(args) > 2 and args[0] == sys.executable and args[1] == "-u"


class WorkerStarter:
    """Starts the workers of one node, over all its rounds.

    Args:
        command: the workers' command as the agent will start it.
        use_zygote: False: always start plainly.
        modules: third-party modules that earlier workers of this run imported.
        on_event: called with an event's name and fields.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        use_zygote: bool,
        modules: Sequence[str],
        on_event: Callable[..., None],
    ) -> None:
        self._guard = Guard()
        self._ended: set[int] = set()
        self._on_event = on_event
        self._zygote: _Zygote | None = None
        if use_zygote and is_plain_python(command):
            self._zygote = _Zygote(tuple(command), dict(os.environ), modules)
            self._guard.watch(self._zygote.pid)

    def start(self, request: StartRequest) -> WorkerProcess:
        """Start one worker, leader of its own session.

        Raises:
            OSError: the command cannot be started.
        """
        worker = self._fork(request)
        if worker is None:
            popen = subprocess.Popen(
                request.args,
                env=_with_boot(request.env, {"mode": "cold"}) if is_plain_python(request.args) else request.env,
                stdout=request.stdout,
                stderr=request.stderr,
                start_new_session=True,
            )
            worker = WorkerProcess(popen.pid, popen)
        self._guard.watch(worker.pid)
        self._ended.discard(worker.pid)  # the number came again
        return worker

    def ended(self, worker: WorkerProcess) -> None:
        """`worker` has been waited for: its session is no longer this agent's to end."""
        self._guard.forget(worker.pid)
        self._ended.add(worker.pid)

    def reap(self) -> None:
        """Wait for what ended workers left behind and died since."""
        reap_adopted(self._ended)

    def close(self) -> None:
        """End the zygote, and every worker that was not reported as ended. Idempotent."""
        self._drop_zygote()
        self._guard.close()

    def _fork(self, request: StartRequest) -> WorkerProcess | None:
        if self._zygote is None:
            return None
        begin = time.monotonic()
        fresh = not self._zygote.num_bytes
        try:
            pid = self._zygote.fork(request)
        except ZygoteUnfit as unfit:
            self._on_event("zygote_unfit", reason=str(unfit))
            if not self._zygote.usable:
                self._drop_zygote()
            return None
        if fresh:
            self._on_event("zygote_ready", bytes=self._zygote.num_bytes)
        self._on_event(
            "zygote_forked",
            pid=pid,
            rank=int(request.env.get("RANK", 0)),
            ms=round((time.monotonic() - begin) * 1e3, 1),
        )
        return WorkerProcess(pid)

    def _drop_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._guard.forget(self._zygote.pid)
            self._zygote = None


class _Zygote:
    """The agent's end of one pre-imported process.

    Attributes:
        pid: of the process.
        num_bytes: of memory that it held once its imports were done (its share of shared pages), 0 before.
        usable: False once it can serve no further fork.
    """

    def __init__(self, command: tuple[str, ...], env: dict[str, str], modules: Sequence[str]) -> None:
        self.usable = True
        self.num_bytes = 0
        self._command = command
        self._env = env
        self._ready = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            boot = {"mode": "zygote", "fd": theirs.fileno(), "modules": list(modules)}
            self._process = subprocess.Popen(
                command, env=_with_boot(env, boot), pass_fds=[theirs.fileno()], start_new_session=True
            )
        self.pid = self._process.pid

    def fork(self, request: StartRequest) -> int:
        """The pid of a new worker. Waits for the imports where they still run.

        Raises:
            ZygoteUnfit: it cannot give this worker; `usable` says whether it may give another.
        """
        if request.args != self._command:
            raise ZygoteUnfit("another command than the zygote's")
        unset = sorted(self._env.keys() - request.env.keys())
        changed = {name: value for name, value in request.env.items() if self._env.get(name) != value}
        if strange := sorted((set(unset) | changed.keys()) - PER_ROUND):
            raise ZygoteUnfit(f"{', '.join(strange)} changed in the environment since the zygote's imports")
        self._await_ready()
        streams = [(stream, fd) for stream, fd in ((request.stdout, 1), (request.stderr, 2)) if stream]
        message = {"set": changed, "unset": unset, "streams": [fd for _, fd in streams]}
        descriptors = array.array("i", [stream.fileno() for stream, _ in streams])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if streams else []
        try:
            self._socket.sendmsg([json.dumps(message).encode()], rights)
        except OSError as error:
            self.usable = False
            raise ZygoteUnfit(f"the zygote does not listen ({error})") from error
        reply = self._receive(_FORK_SECONDS)
        if "pid" not in reply:
            self.usable = False
            raise ZygoteUnfit(reply["error"])
        return int(reply["pid"])

    def close(self) -> None:
        """End it. Its workers live on."""
        self.usable = False
        self._socket.close()
        self._process.kill()  # it may still be importing
        self._process.wait()

    def _await_ready(self) -> None:
        if self._ready:
            return
        reply = self._receive(_IMPORT_SECONDS)
        if not reply["ready"]:
            self.usable = False
            raise ZygoteUnfit(f"cannot be forked: {reply['reason']}")
        self._ready = True
        self.num_bytes = _held_bytes(self.pid)

    def _receive(self, seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            message = self._socket.recv(1 << 16)
        except OSError as error:
            self.usable = False
            raise ZygoteUnfit(f"no answer within {seconds:g} s ({error})") from error
        if not message:
            self.usable = False
            raise ZygoteUnfit("the zygote ended")
        reply: dict[str, Any] = json.loads(message)
        return reply


def _held_bytes(pid: int) -> int:
    """Memory of a process, pages that it shares counted in part; 0 where the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _with_boot(env: Mapping[str, str], boot: Mapping[str, Any]) -> dict[str, str]:
    """`env` with the boot hook in it; the hook takes it out again before the script begins."""
    path = env.get("PYTHONPATH")
    message = {**boot, "agent": os.getpid(), "pythonpath": path, "bootstrap": BOOTSTRAP}
    return {
        **env,
        "PYTHONPATH": f"{BOOT_FOLDER}{os.pathsep}{path}" if path else str(BOOT_FOLDER),
        ENV_BOOT: json.dumps(message),
    }
