"""What this worker says of itself: a page of shared memory, and a few events in the run's log."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any

from gemini_run.journal import append_event
from gemini_run.memory.beacons import Beacon, BeaconState
from gemini_run.memory.reserve import with_reserve
from gemini_run.terminal import say
from gemini_run.wire import MemoryPaths, RunPaths, WorkerContext

COMMIT_EVENT_SECONDS = 5.0  #: snapshot_committed is written at most this often


class Progress:
    """Beacon and events of one worker; used by the training thread and the commit thread."""

    def __init__(self, context: WorkerContext, rank: int, local_rank: int) -> None:
        self._context = context
        self._rank = rank
        self._lock = threading.Lock()
        paths = MemoryPaths(Path(context.memory_dir))
        self._beacon = with_reserve(paths, lambda: Beacon(paths.beacon(local_rank), writable=True))
        self._state = BeaconState(
            pid=os.getpid(), phase="starting", iteration=0, snapshot=0, committed=0,
            changed_at=time.time(), stall=0.0, state_bytes=0, first_step_at=0.0,
        )  # fmt: skip
        self._beacon.write(self._state)
        self._events = RunPaths(Path(context.run_dir)).events
        self._events_work = True
        self._last_commit_event = 0.0

    @property
    def state(self) -> BeaconState:
        return self._state

    def update(self, **changes: Any) -> None:
        """Change fields of the beacon."""
        with self._lock:
            self._state = dataclasses.replace(self._state, changed_at=time.time(), **changes)
            self._beacon.write(self._state)

    def committed(self, iteration: int, interval: int) -> None:
        """An iteration is complete on every rank; snapshots are `interval` iterations apart."""
        self.update(committed=iteration, interval=interval)
        now = time.monotonic()
        if self._rank == 0 and now - self._last_commit_event >= COMMIT_EVENT_SECONDS:
            self._last_commit_event = now
            self.event(
                "snapshot_committed", iteration=iteration, stall_ms=round(1e3 * self._state.stall, 3),
                state_bytes=self._state.state_bytes,
            )  # fmt: skip

    def event(self, name: str, **fields: Any) -> None:
        """Append to the run's log. A log that cannot be written is said once and never ends training."""
        if not self._events_work:
            return
        try:
            append_event(
                self._events, name, node=self._context.node_id, rank=self._rank, round=self._context.round,
                **fields,
            )  # fmt: skip
        except OSError as error:
            self._events_work = False
            say(f"warning: rank {self._rank} cannot write {self._events}: {error.strerror}; no more events")
