"""The slots of this node that hold a peer rank's shard."""

from __future__ import annotations

import contextlib

from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot, SlotHeader
from gemini_run.wire import MemoryPaths


class ReplicaSlots:
    """The slots that hold one peer rank's shard on this node. Not thread-safe."""

    def __init__(self, paths: MemoryPaths, owner: int) -> None:
        self._paths = paths
        self.owner = owner
        self._slots: dict[int, Slot] = {}
        self._iterations: dict[int, int] = {}

    def newest(self) -> SlotHeader | None:
        """Of the complete ones, whichever round or process wrote it."""
        held = [info.header for info in scan_slots(self._paths) if info.usable and info.header]
        return max((h for h in held if h.owner == self.owner), key=lambda header: header.iteration, default=None)

    def writable(self, keep: int, capacity: int) -> tuple[int, Slot]:
        """A slot with room that does not hold iteration `keep`, locked and torn. Raises: MemoryFull."""
        index = 0
        while True:
            slot = self._slots.get(index) or self._open(index, capacity)
            # Asked before its size: one that is too small may still be the one to keep.
            if self._iterations.get(index) != keep and not slot.header_hold() and slot.try_lock():
                if slot.capacity < capacity:
                    with contextlib.suppress(BufferError):  # a view lives on: unmapped when that goes
                        slot.close()
                    slot = self._create(index, capacity)
                    slot.try_lock()
                slot.begin()
                self._iterations.pop(index, None)
                return index, slot
            index += 1

    def done(self, index: int, iteration: int) -> None:
        self._iterations[index] = iteration
        self._slots[index].unlock()

    def abandon(self, index: int) -> None:
        """The transfer failed: the slot stays torn."""
        self._slots[index].unlock()

    def _open(self, index: int, capacity: int) -> Slot:
        try:
            slot = Slot(self._paths.slot(self.owner, index), writable=True)
        except (FileNotFoundError, ReplicaCorrupt):  # none, or a file too short to be one
            return self._create(index, capacity)
        self._slots[index] = slot
        try:
            header = slot.header()
        except ReplicaCorrupt:
            return slot  # whatever it was, it is about to be overwritten
        if header.complete:
            self._iterations[index] = header.iteration
        return slot

    def _create(self, index: int, capacity: int) -> Slot:
        path = self._paths.slot(self.owner, index)
        path.unlink(missing_ok=True)  # first, so that old and new never need room at the same time
        slot = self._slots[index] = Slot.create(path, capacity)
        return slot
