"""A worker process as the agent holds it, and the guard that outlives the agent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from gemini_run.agent import guard

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Let orphaned descendants (workers forked by the zygote) become this process's children.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def is_running(pid: int) -> bool:
    """Whether process `pid` runs: one that has ended does not, even where nobody has reaped it, as in a container whose
    first process reaps no orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def readable(file: int | socket.socket, seconds: float | None) -> bool:
    """Whether there is something to read, waiting at most `seconds` for it (None: for ever). Of any descriptor: those
    of select() end at 1023, and an agent may have many files open."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1e3))


def reap_adopted(sessions: Collection[int]) -> None:
    """Wait for dead processes that this subreaper inherited from ended workers, known by their sessions.

    Other children are left to whoever started them.
    """
    for thread in os.listdir("/proc/self/task"):
        try:
            children = Path(f"/proc/self/task/{thread}/children").read_text().split()
        except OSError:
            continue  # the thread ended, or a kernel without this file: zombies stay until the agent ends
        for child in map(int, children):
            try:
                fields = Path(f"/proc/{child}/stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] == b"Z" and child not in sessions and int(fields[3]) in sessions:
                    os.waitpid(child, os.WNOHANG)
            except (OSError, ChildProcessError):
                continue  # waited for meanwhile


class WorkerProcess:
    """A child that leads its own session: what torch expects of ``subprocess.Popen``, over any child pid.

    Attributes:
        pid: of the worker; also its session and process group.
        pidfd: readable once the worker ended. Closed when it has been waited for.
        returncode: exit code, ``-signal``, or None while it runs.
    """

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.returncode: int | None = None
        self._popen = popen
        self._kill_at: float | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs. Of a worker that failed, the rest of its group is killed as well."""
        if self.returncode is not None:
            return self.returncode
        found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        if found.si_code != os.CLD_EXITED or found.si_status != 0:
            # Before the wait: until then the dead leader keeps its number, so the group is surely its own.
            self._signal_group(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        os.close(self.pidfd)
        if self._popen is not None:
            self._popen.returncode = self.returncode  # it must not wait for this pid again
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the worker ended, at most `timeout` seconds and no longer than its grace after `stop`.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if self._kill_at is not None:
            end = self._kill_at if end is None else min(end, self._kill_at)
        while (code := self.poll()) is None:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            readable(self.pidfd, left)
        return code

    def stop(self, death_signal: signal.Signals, grace: float) -> None:
        """Signal the worker's group; from now on `wait` ends after `grace` seconds (or fresh ones after SIGKILL)."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + grace
        if death_signal == signal.SIGKILL:
            self._kill_at = None
        if self.returncode is None:
            self._signal_group(death_signal)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # the group is empty, or only holds what is no longer ours


class Guard:
    """The process of `guard.py`: kills the sessions told to it if this process is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._sessions: set[int] = set()

    @property
    def sessions(self) -> frozenset[int]:
        """Sessions under guard."""
        return frozenset(self._sessions)

    def watch(self, session: int) -> None:
        self._sessions.add(session)
        self._tell(f"+{session}")

    def forget(self, session: int) -> None:
        """The session ended, or may live on."""
        if session in self._sessions:
            self._sessions.discard(session)
            self._tell(f"-{session}")

    def close(self) -> None:
        """Kill the sessions still under guard, as if this process had ended. Idempotent."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # it was killed: nothing left to tell
        self._process.wait()

    def _tell(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # the guard was killed; the workers' own death signal remains
