"""Beacons: what each worker of a node last said of itself, in a page of shared memory."""

from __future__ import annotations

import dataclasses
import mmap
import os
import struct
from pathlib import Path

from gemini_run.wire import MemoryPaths

PHASES = ("starting", "restoring", "training", "snapshot", "finished")
_BEACON = struct.Struct("<I I Q Q Q d d Q d d")


@dataclasses.dataclass(frozen=True)
class BeaconState:
    """What a worker last said of itself.

    Attributes:
        pid: of the worker.
        phase: one of PHASES.
        iteration: iterations finished.
        snapshot: newest iteration whose own slot is complete here.
        committed: newest iteration known complete on every rank, replicas included.
        changed_at: unix seconds of the last change.
        stall: seconds the training thread spent in the last snapshot.
        state_bytes: size of this rank's state.
        first_step_at: unix seconds at which the first iteration of this round was finished, 0 before.
        interval: iterations from one snapshot to the next, 0 before the first commit.
    """

    pid: int
    phase: str
    iteration: int
    snapshot: int
    committed: int
    changed_at: float
    stall: float
    state_bytes: int
    first_step_at: float
    interval: int = 0


class Beacon:
    """One worker's page of shared memory: written without a system call, read by the agent at any time."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        mode = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        descriptor = os.open(path, mode | os.O_CLOEXEC, 0o600)
        try:
            if writable:
                os.posix_fallocate(descriptor, 0, 4096)  # a page that is not there when it is written is a SIGBUS
            self._map = mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        finally:
            os.close(descriptor)

    def write(self, state: BeaconState) -> None:
        _BEACON.pack_into(
            self._map, 0, state.pid, PHASES.index(state.phase), state.iteration, state.snapshot,
            state.committed, state.changed_at, state.stall, state.state_bytes, state.first_step_at,
            state.interval,
        )  # fmt: skip

    def read(self) -> BeaconState:
        pid, phase, iteration, snapshot, committed, changed_at, stall, size, first, interval = _BEACON.unpack_from(
            self._map, 0
        )
        return BeaconState(
            pid, PHASES[phase], iteration, snapshot, committed, changed_at, stall, size, first, int(interval)
        )  # fmt: skip

    def close(self) -> None:
        self._map.close()


def read_beacons(paths: MemoryPaths) -> dict[int, BeaconState]:
    """Local rank -> what that worker last said; workers that said nothing yet are missing."""
    found = {}
    try:
        entries = sorted(paths.beacons.iterdir())
    except FileNotFoundError:
        return {}
    for path in entries:
        try:
            beacon = Beacon(path, writable=False)
        except (FileNotFoundError, ValueError):
            continue  # vanished, or made and not yet given its size
        try:
            state = beacon.read()
        except IndexError:
            continue  # a phase of a newer release
        finally:
            beacon.close()
        if state.pid:
            found[int(path.name[1:])] = state
    return found
