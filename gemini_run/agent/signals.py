"""Signals to the launcher: those that end it, and SIGUSR1 and SIGUSR2, which are the workers'.

SIGTERM, SIGINT, SIGHUP, SIGQUIT (what ``--signals-to-handle`` names) end this node's part of the run in order from when
it joins the rendezvous; before that, they just end the process. SIGUSR1 and SIGUSR2 never end it: each goes to the
workers of this node that catch it. One that comes while no worker runs (a round is being formed, a spare waits) goes to
the workers of the next round. A worker that does not catch it may be about to: it is given the signal later if it comes
to catch it within SET_UP_SECONDS of its start and before its first iteration is finished. Nothing here imports torch:
the launcher does that only after `hold`.
"""

from __future__ import annotations

import collections
import dataclasses
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from gemini_run.terminal import say

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
SET_UP_SECONDS = 60.0  #: after so long a worker's script has set up the handlers that it will ever have

_received: collections.deque[signal.Signals] = collections.deque()  # noted by the handler, which may do nothing else


class Process(Protocol):
    """What is asked of a worker: `agent.process.WorkerProcess` has it."""

    pid: int
    pidfd: int
    returncode: int | None


def hold() -> None:
    """From now on SIGUSR1 and SIGUSR2 are noted for a `Forwarder` instead of ending this process.

    Raises:
        ValueError: not called in the main thread.
    """
    for number in FORWARDED:
        signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))


def end_by(names: str, ending: Callable[[signal.Signals], Exception]) -> str:
    """From now on each signal of `names` (separated by commas) raises what `ending` makes of it, in the main thread.

    torch does the same when it starts the first workers; until then a node that waits for others would just die.

    Returns: what torch is to handle: `names`, without SIGHUP where this process was started to ignore it (nohup).

    Raises:
        ValueError: not called in the main thread.
    """
    handled = [name.strip() for name in names.split(",")]
    if "SIGHUP" in handled and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        names = ",".join(name for name in handled if name != "SIGHUP")

    def end(number: int, frame: FrameType | None) -> None:
        raise ending(signal.Signals(number))

    for name in names.split(","):
        number = getattr(signal, name.strip(), None)
        if isinstance(number, signal.Signals):  # else torch says so
            signal.signal(number, end)
    return names


def caught_signals(status: str) -> frozenset[int]:
    """The numbers of the signals that a process has handlers for.

    Args:
        status: the text of its ``/proc/PID/status``.

    Raises:
        ValueError: that is none.
    """
    for line in status.splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            bits = int(mask, 16)
            return frozenset(number for number in range(1, bits.bit_length() + 1) if bits >> (number - 1) & 1)
    raise ValueError("no SigCgt line in the status of a process")


def send_if_caught(process: Process, number: signal.Signals) -> bool:
    """Send `number` to `process`, not to its children, if it catches it. False: it does not, or it has ended."""
    try:
        if number not in caught_signals(Path(f"/proc/{process.pid}/status").read_text(errors="replace")):
            return False
        signal.pidfd_send_signal(process.pidfd, number)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


@dataclasses.dataclass
class _Pending:
    """A signal on its way: `reached` are the workers that have it, global rank -> pid."""

    number: signal.Signals
    reached: dict[int, int] = dataclasses.field(default_factory=dict)


class Forwarder:
    """Passes what was noted on to the workers of this node. Belongs to the main thread.

    Args:
        on_event: called with an event's name and fields, once for each signal.
        stepped: the pids of workers that have finished an iteration in this round.
        send: sends a signal to a worker that catches it; whether it did.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        on_event: Callable[..., Any],
        stepped: Callable[[], Collection[int]],
        *,
        send: Callable[[Any, signal.Signals], bool] = send_if_caught,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_event = on_event
        self._stepped = stepped
        self._send = send
        self._clock = clock
        self._pending: list[_Pending] = []
        self._workers: Mapping[int, Process] = {}
        self._started_at = 0.0

    def workers_started(self, workers: Mapping[int, Process]) -> None:
        """A round's workers, by global rank, have just been started."""
        self._workers = workers
        self._started_at = self._clock()

    def turn(self) -> None:
        """Send on what can be; to be called now and then while workers run."""
        self._take()
        running = {rank: process for rank, process in self._workers.items() if process.returncode is None}
        if not self._pending or not running:
            return
        stepped = self._stepped()
        late = self._clock() - self._started_at > SET_UP_SECONDS
        for pending in list(self._pending):
            maybe_later = False
            for rank, process in running.items():
                if pending.reached.get(rank) == process.pid:
                    continue
                if self._send(process, pending.number):
                    pending.reached[rank] = process.pid
                elif not late and process.pid not in stepped:
                    maybe_later = True
            if not maybe_later:
                self._settle(pending, "ignored", "no worker of this node catches it")

    def close(self) -> None:
        """No worker will run any more: say what reached none."""
        self._take()
        for pending in list(self._pending):
            self._settle(pending, "dropped", "the run ended here before a worker could take it")

    def _take(self) -> None:
        while _received:
            number = _received.popleft()
            # One that nobody has yet and the same again are one, as for the kernel.
            if not any(pending.number == number and not pending.reached for pending in self._pending):
                self._pending.append(_Pending(number))

    def _settle(self, pending: _Pending, otherwise: str, reason: str) -> None:
        self._pending.remove(pending)
        ranks = sorted(pending.reached)
        outcome = "forwarded" if ranks else otherwise
        self._on_event("user_signal", signal=pending.number.name, outcome=outcome, ranks=ranks)
        to = f"to rank {', '.join(map(str, ranks))}"
        say(f"{pending.number.name} {outcome}{f' {to}' if ranks else f': {reason}'}")
