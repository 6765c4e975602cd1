"""Replica traffic of this worker: its pace, the interval that it needs, and what is said of both."""

from __future__ import annotations

import os
import time

from gemini_run.peers.group import address_towards
from gemini_run.peers.link import LinkCounter, Sampler, interface_of
from gemini_run.peers.pace import Pace
from gemini_run.terminal import say
from gemini_run.wire import Interval, WorkerContext
from gemini_run.worker.beacon import Progress
from gemini_run.worker.commit import Committer
from gemini_run.worker.interval import Intervals

_LOOPBACK = "lo"


class ReplicaTraffic:
    """What the training thread tells the traffic.

    Attributes:
        pace: None where replicas go at once: there are none, the budget is off, or they never leave the machine.
        intervals: for the commit thread; None where there are no replicas.
    """

    def __init__(self, context: WorkerContext, rank: int, progress: Progress) -> None:
        self._progress = progress
        self._said = context.snapshot_interval
        self.pace: Pace | None = None
        self.intervals: Intervals | None = None
        if context.replicas < 2:
            return
        if context.overhead_budget is not None:
            interface = _interface(context)
            if interface != _LOOPBACK:
                self.pace = Pace(
                    budget=context.overhead_budget, interval=context.snapshot_interval,
                    sampler=self._sampler(interface, rank),
                    listener=lambda name, fields: progress.event(name, **fields),
                )  # fmt: skip
        self.intervals = Intervals(
            rank, context.snapshot_interval, need=self._need if self.pace is not None else None,
            on_change=self._interval_changed,
        )  # fmt: skip

    def boundary(self) -> None:
        """An iteration has ended."""
        if self.pace is not None:
            self.pace.boundary(time.perf_counter())

    def urge(self) -> None:
        """Training is about to wait for the pending commit."""
        if self.pace is not None:
            self.pace.urge()

    def waited(self, seconds: float) -> None:
        """So long, for the commit before the snapshot that was due."""
        if self.pace is not None:
            self.pace.waited(seconds)

    def resume(self, committer: Committer | None) -> None:
        """Training goes on."""
        if self.pace is not None:
            self.pace.resume(time.perf_counter(), quiet=committer is None or committer.wait(0))

    def close(self) -> None:
        """Nothing is held back any more."""
        if self.pace is not None:
            self.pace.close()

    def _need(self) -> Interval:
        assert self.pace is not None, "asked only then"
        return self.pace.wish

    def _sampler(self, interface: str | None, rank: int) -> Sampler | None:
        try:
            if interface is None:
                raise OSError("no interface has the address that replicas are sent from")
            return Sampler(LinkCounter(interface).read)
        except OSError as error:
            self._progress.event("traffic_unseen", reason=str(error))
            if rank == 0:
                say(f"replica traffic cannot see training's: {error}; it is spread evenly over the iterations")
            return None

    def _interval_changed(self, interval: Interval) -> None:
        """On rank 0's commit thread: in force from the next record on."""
        self._progress.event(
            "interval_changed", interval=interval.iterations, reason=interval.reason, passing=interval.passing
        )
        if interval.passing or interval.iterations == self._said:
            return
        self._said = interval.iterations
        every = f"every {interval.iterations} iterations" if interval.iterations > 1 else "every iteration"
        say(f"snapshots {every} from now on: {interval.reason}")


def _interface(context: WorkerContext) -> str | None:
    """The one that replicas take (see `peers.group`), None where that cannot be told."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return named
    try:
        return interface_of(address_towards(context.store_host))
    except OSError:  # the store's name is unknown: the group will not form either, and says so
        return None
