"""One pre-imported process of a node, as its agent holds it: workers are forked from it, or it becomes one itself."""

from __future__ import annotations

import array
import dataclasses
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gemini_run.agent.process import readable
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


class Preimported:
    """The agent's end of one pre-imported process.

    What kind it is shows once its imports are done: "fork": a zygote, which forks any number of workers; "standby":
    it has threads and cannot be forked, so it becomes one worker itself; "unfit": it holds a device, and is of no use.

    Attributes:
        pid: of the process.
        kind: None before its imports are done.
        reason: why it is not of kind "fork".
        culprits: packages beyond the usual ones whose import left threads behind.
        imported: modules that it has beyond the usual ones.
        num_bytes: of memory that it held then (its share of shared pages).
        usable: False once it can serve no further worker.
        process: what became the worker, of a standby that was taken.
    """

    def __init__(self, command: tuple[str, ...], env: dict[str, str], imports: Path, left_out: Sequence[str]) -> None:
        """
        Args:
            imports: file with the names of modules to import beyond the usual ones (a JSON list), which may not exist.
            left_out: packages in it that are not to be imported.
        """
        self.usable = True
        self.kind: str | None = None
        self.reason: str | None = None
        self.culprits: tuple[str, ...] = ()
        self.imported = 0
        self.num_bytes = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._env = env
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            boot = {"mode": "zygote", "fd": theirs.fileno(), "imports": str(imports), "left_out": list(left_out)}
            self._process = subprocess.Popen(
                command, env=with_boot(env, boot), pass_fds=[theirs.fileno()], start_new_session=True
            )
        self.pid = self._process.pid

    def start(self, request: StartRequest) -> int:
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
        if not self.settled(_IMPORT_SECONDS):
            self.usable = False
            raise ZygoteUnfit(f"its imports are not done after {_IMPORT_SECONDS:g} s")
        if not self.usable:
            raise ZygoteUnfit(f"cannot be forked: {self.reason}")
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
        pid = int(reply["pid"])
        if pid == self.pid:
            self.usable, self.process = False, self._process
        return pid

    def settled(self, seconds: float = 0.0) -> bool:
        """Whether its imports are done, waiting up to `seconds` for it; then `kind` and the rest are known."""
        if self.kind is None and self.usable:
            if not readable(self._socket, seconds):
                return False
            try:
                reply = self._receive(_FORK_SECONDS)
            except ZygoteUnfit as error:
                reply = {"kind": "unfit", "reason": str(error), "culprits": [], "imported": 0}
            self.kind, self.reason, self.culprits = reply["kind"], reply["reason"], tuple(reply["culprits"])
            self.imported = reply["imported"]
            self.usable = self.kind != "unfit"
            self.num_bytes = _held_bytes(self.pid)
        return True

    def close(self) -> None:
        """End it, unless it has become a worker. Its workers live on."""
        self.usable = False
        self._socket.close()
        if self.process is None:
            self._process.kill()  # it may still be importing
            self._process.wait()

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


def with_boot(env: Mapping[str, str], boot: Mapping[str, Any]) -> dict[str, str]:
    """`env` with the boot hook in it; the hook takes it out again before the script begins."""
    path = env.get("PYTHONPATH")
    message = {**boot, "agent": os.getpid(), "pythonpath": path, "bootstrap": BOOTSTRAP}
    return {
        **env,
        "PYTHONPATH": f"{BOOT_FOLDER}{os.pathsep}{path}" if path else str(BOOT_FOLDER),
        ENV_BOOT: json.dumps(message),
    }
