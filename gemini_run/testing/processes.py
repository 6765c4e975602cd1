"""Finding and ending every process that came from one start, and waiting with a deadline."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from gemini_run.agent.process import is_running

#: set in a node's environment; every process that descends from it keeps it, daemons included
MARKER = "GEMINI_TESTING_NODE"

_POLL_SECONDS = 0.02
_T = TypeVar("_T")


class WaitTimeout(AssertionError):
    """Something waited for did not come about. The message says what, and ends with the nodes' output."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(
    predicate: Callable[[], _T],
    timeout: float,
    what: str,
    *,
    context: Callable[[], str] | None = None,
) -> _T:
    """Poll `predicate` until it is true and return its value.

    Args:
        timeout: seconds. A generous one costs nothing where the thing does happen.
        what: completes the sentence "timed out waiting for ...".
        context: called on a timeout; its text is added to the message.

    Raises:
        WaitTimeout: it did not become true in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            detail = f"\n{context()}" if context else ""
            raise WaitTimeout(f"timed out after {timeout:g} s waiting for {what}{detail}")
        time.sleep(_POLL_SECONDS)


def marked_processes(marker: str) -> list[int]:
    """Living processes whose environment at start had ``GEMINI_TESTING_NODE=<marker>``, and all children.

    The mark finds those that left the process tree and the session (double forks, setsid); the walk over
    parents finds those that were started with another environment.
    """
    needle = f"{MARKER}={marker}".encode()
    found: set[int] = set()
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state in (b"Z", b"X"):
                continue
            parents[pid] = int(parent)
            with open(f"/proc/{pid}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.add(pid)
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return sorted(found | _descendants(parents, found))


def _descendants(parents: dict[int, int], roots: set[int]) -> set[int]:
    reached = set(roots)
    while True:
        more = {pid for pid, parent in parents.items() if parent in reached} - reached
        if not more:
            return reached
        reached |= more


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each; those that ended meanwhile are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def stop_all(marker: str) -> list[int]:
    """SIGSTOP every process of `marker`, again until no new one turns up, and return them."""
    stopped: set[int] = set()
    while new := set(marked_processes(marker)) - stopped:
        signal_all(new, signal.SIGSTOP)
        stopped |= new
    return sorted(stopped)


def kill_all(marker: str) -> list[int]:
    """SIGKILL every process of `marker` as if the power went; return those that were alive.

    All are stopped first, so that none sees another die and acts on it.
    """
    killed: set[int] = set()
    while alive := stop_all(marker):
        signal_all(alive, signal.SIGKILL)
        killed |= set(alive)
        _await_end(alive)
    return sorted(killed)


def _await_end(pids: list[int]) -> None:
    # A killed process holds its mappings and sockets until it is gone: the caller counts on them being free.
    waiting = set(pids)

    def gone() -> bool:
        waiting.intersection_update(pid for pid in waiting if is_running(pid))
        return not waiting

    wait_for(gone, 30, f"the end of killed processes {sorted(waiting)}")
