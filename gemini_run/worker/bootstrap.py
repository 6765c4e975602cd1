"""Start of a worker's interpreter, before the script: the zygote that workers are forked from, and what every
worker gets. Imports the standard library alone; the zygote imports the rest on purpose."""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import site
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gemini_run.journal import write_json_atomic
from gemini_run.wire import RunPaths, WorkerContext

#: imported before the fork. torch._dynamo is what the first optimizer step imports.
PREIMPORTED = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.utils.data",
    "torch.optim",
    "torch._dynamo",
    "gemini_run.worker.checkpointer",
)
MESSAGE_BYTES = 1 << 18
_MAX_DESCRIPTORS = 2
_PR_SET_PDEATHSIG = 1
_UNRECORDED_EXIT = 1
_FEW = 20
_MANY_MODULES = 20
#: importing them talks to other processes: once for each worker, never before the fork
NEVER_PREIMPORTED = ("mpi4py", "horovod")
_at_start: set[str] = set()  # modules that were there before the script began


def enter(boot: dict[str, Any]) -> None:
    """Make this interpreter a worker. In a zygote it serves forks and returns in the workers only.

    Args:
        boot: the agent's message: ``mode`` ("cold" or "zygote"), ``agent`` (its pid), and for a zygote ``fd``
            (its socket), ``imports`` (file with what to import beside PREIMPORTED) and ``left_out`` (of these).
    """
    if boot["mode"] == "zygote":
        try:
            _serve(boot)
        except BaseException:  # noqa: BLE001 - process top: whatever it was, the script must not run in the zygote
            traceback.print_exc()
            os._exit(_UNRECORDED_EXIT)
    else:
        _die_with(boot["agent"])
    _record_uncaught_exceptions()
    _at_start.update(sys.modules)
    atexit.register(_record_imports_of, os.getpid())


# --- the zygote ------------------------------------------------------------------------------------


def _serve(boot: dict[str, Any]) -> None:
    """Import, say what this process is good for, then start one worker a request. Returns in the workers."""
    channel = socket.socket(fileno=boot["fd"])
    failed, _ = _import_all(PREIMPORTED)
    more = [name for name in _seen_imports(Path(boot["imports"])) if name.split(".")[0] not in boot["left_out"]]
    more_failed, culprits = _import_all(more)
    kind, reason = _fitness()
    gc.collect()
    gc.freeze()  # the collector would else write into pages that all workers share
    told = {"kind": kind, "reason": reason, "culprits": sorted({name.split(".")[0] for name in culprits}),
            "imported": len(more) - len(more_failed), "failed": sorted({*failed, *more_failed})[:_FEW]}  # fmt: skip
    channel.send(json.dumps(told).encode())
    while True:
        request, descriptors = _receive(channel)
        kind, reason = _fitness()
        if kind == "standby":
            _die_with(boot["agent"])
            channel.send(json.dumps({"pid": os.getpid()}).encode())
            channel.close()
            _become_worker(request, descriptors)
            return
        if kind == "unfit":
            channel.send(json.dumps({"error": reason}).encode())
        elif _fork_worker(channel, boot["agent"]):
            _become_worker(request, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _import_all(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Import each.

    Returns: (those that fail -> why: a worker that needs one of them says so itself; those that leave threads)
    """
    failed, culprits = {}, []
    known = _lasting_threads()
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - foreign module code may raise anything
            failed[name] = f"{type(error).__name__}: {error}"
        if _num_threads() > known and (now := _lasting_threads()) > known:
            known = now
            culprits.append(name)
    return failed, culprits


def _lasting_threads() -> int:
    """How many threads are left after a fork. Libraries that can be forked (OpenBLAS) end their idle threads at it,
    and start new ones where they need them; threads that are left belong to libraries that cannot."""
    if _num_threads() > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return _num_threads()


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fitness() -> tuple[str, str | None]:
    """What this process is good for ("fork", "standby" or "unfit"), and if not the first, why."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband")):
            return "unfit", f"the device {target} is open after the imports"
    if (threads := _lasting_threads()) > 1:
        return "standby", f"{threads} threads run after the imports"
    return "fork", None


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    try:
        message, ancillary, _, _ = channel.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4))
    except ConnectionResetError:
        message, ancillary = b"", []
    if not message:
        os._exit(0)  # the agent is gone, or has no more use for this zygote
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return json.loads(message), list(descriptors)


def _fork_worker(channel: socket.socket, agent: int) -> bool:
    """Fork twice, so that the worker becomes the child of the agent (a subreaper). True in the worker."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.0005)
    _die_with(agent)  # only now: the death of the process between must not count
    channel.send(json.dumps({"pid": os.getpid()}).encode())
    channel.close()
    return True


def _become_worker(request: dict[str, Any], descriptors: list[int]) -> None:
    for descriptor, target in zip(descriptors, request["streams"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for name in request["unset"]:
        os.environ.pop(name, None)
    os.environ.update(request["set"])
    # What is drawn once per process at import would else be the same in every worker.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


# --- every worker ----------------------------------------------------------------------------------


def _die_with(agent: int) -> None:
    """End this process when the agent does, also when it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:  # it died before the call above
        os._exit(_UNRECORDED_EXIT)


def _record_uncaught_exceptions() -> None:
    """Leave the exception that ends the script in torchelastic's error file, as ``@record`` does, where the
    script does not use that itself. The traceback stays as it is: no frame is added."""
    worker = os.getpid()
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and os.getpid() == worker and not os.path.exists(path):
            details = {
                "py_callstack": "".join(traceback.format_exception(kind, error, trace)),
                "timestamp": str(int(time.time())),
            }
            message = {"message": f"{kind.__name__}: {error}", "extraInfo": details}
            try:
                write_json_atomic(Path(path), {"message": message})
            except OSError:
                pass  # the log folder is gone or full: the traceback below is all that can be had
        before(kind, error, trace)

    sys.excepthook = hook


def _record_imports_of(worker: int) -> None:
    if os.getpid() == worker:
        record_imports()


def record_imports() -> None:
    """Add the third-party modules that this script imported to the run's list, for the next zygote to import before
    the fork. Called at a worker's end and by the checkpointer after the first iteration; outside gemini-run a no-op."""
    context = WorkerContext.from_env()
    if context is None or os.environ.get("LOCAL_RANK") != "0":
        return
    path = RunPaths(Path(context.run_dir)).imports
    known = _seen_imports(path)
    names = list(dict.fromkeys([*known, *third_party_modules()]))
    if worth_another_zygote(names[len(known) :]):
        try:
            write_json_atomic(path, names)
        except OSError:
            pass  # only speed is lost


def worth_another_zygote(names: Sequence[str]) -> bool:
    """Whether to import these before the fork saves more than it costs: a few seconds of a core, on each node. Some
    small modules of torch, which nearly every script comes to import, do not."""
    return len(names) >= _MANY_MODULES or any(name.partition(".")[0] != "torch" for name in names)


def _seen_imports(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        return []  # none yet
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def third_party_modules() -> list[str]:
    """Modules from a site-packages folder that were imported since the script began, in that order."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    folders.update(entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages"))
    found = []
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        top, _, last = name.rpartition(".")
        if name in _at_start or not origin or last in ("sitecustomize", "usercustomize", "__main__", "__mp_main__"):
            continue
        if (top or last).split(".")[0] in NEVER_PREIMPORTED or getattr(module, "__name__", None) != name:
            continue  # the second: an alias, which its package makes by itself
        if any(origin.startswith(f"{folder}{os.sep}") for folder in folders):
            found.append(name)
    return found
