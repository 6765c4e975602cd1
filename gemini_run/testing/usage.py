"""What a node's processes and its memory take, as the kernel says it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from gemini_run.memory.segment import occupied_bytes, scan_slots
from gemini_run.testing.nodes import Node

_FEW_FILES = 3  #: open for a moment: a log, a status file, a connection
_SMALL = 4 * 2**20  #: bytes that allocators keep and objects take


@dataclasses.dataclass(frozen=True)
class ProcessUse:
    """Of one process.

    Attributes:
        private_bytes: resident memory of its own.
        shared_bytes: resident pages of mapped shared memory: slots.
        descriptors: open file descriptors.
    """

    private_bytes: int
    shared_bytes: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> ProcessUse:
        """Raises: OSError if it has ended."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes = {k: v.split()[0] for k, v in (line.split(":", 1) for line in lines) if k.startswith("Rss")}
        return cls(1024 * int(sizes["RssAnon"]), 1024 * int(sizes["RssShmem"]), len(os.listdir(f"/proc/{pid}/fd")))


@dataclasses.dataclass(frozen=True)
class NodeUse:
    """Of one node.

    Attributes:
        agent, workers: its processes; workers by local rank.
        slots: slot files in its memory.
        memory_bytes: of all that lies in its memory directory.
        state_bytes: of the largest state that a worker has captured.
    """

    agent: ProcessUse
    workers: tuple[ProcessUse, ...]
    slots: int
    memory_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, node: Node) -> NodeUse:
        """Raises: RuntimeError if no job runs there; OSError if a process ends meanwhile."""
        paths = node.memory()
        beacons = node.beacons()
        if paths is None or not beacons:
            raise RuntimeError(f"node {node.index} has no worker")
        return cls(
            agent=ProcessUse.of(node.pid),
            workers=tuple(ProcessUse.of(beacon.pid) for _, beacon in sorted(beacons.items())),
            slots=len(scan_slots(paths)),
            memory_bytes=occupied_bytes(paths),
            state_bytes=max(beacon.state_bytes for beacon in beacons.values()),
        )


def grown(samples: Sequence[Sequence[NodeUse]], *, slots: int) -> list[str]:
    """What grew from the first sample to the last, and where a node's memory was more than it may be.

    Args:
        samples: of all nodes, each of which has one worker and keeps one replica for a peer. The first one is to be
            taken when every slot is made.
        slots: that a node may have: two of its own and two of the replica, one more where the durable tier holds some.
    """
    problems = []
    for at, uses in enumerate(zip(*samples, strict=True)):
        first, last = uses[0], uses[-1]
        pairs = [("agent", first.agent, last.agent)]
        pairs += [(f"worker {i}", *pair) for i, pair in enumerate(zip(first.workers, last.workers, strict=True))]
        for name, before, after in pairs:
            if after.descriptors > before.descriptors + _FEW_FILES:
                problems.append(f"node {at}, {name}: {before.descriptors} open files became {after.descriptors}")
            if after.private_bytes > before.private_bytes + max(_SMALL, first.state_bytes // 2):
                problems.append(f"node {at}, {name}: {before.private_bytes} bytes became {after.private_bytes}")
        for use in uses:
            allowed = 1.05 * slots * use.state_bytes
            if use.memory_bytes > allowed:
                problems.append(f"node {at}: {use.memory_bytes} bytes in slots of a state of {use.state_bytes}")
    return problems
