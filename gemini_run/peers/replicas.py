"""The slots of this node that hold a peer rank's shard."""

from __future__ import annotations

from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.header import SlotHeader
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.wire import MemoryPaths


class ReplicaSlots:
    """The slots that hold one peer rank's shard on this node. Not thread-safe."""

    def __init__(self, paths: MemoryPaths, owner: int) -> None:
        self._paths = paths
        self.owner = owner
        self._slots: dict[int, Slot] = {}
        self._iterations: dict[int, int] = {}
        self._worlds: dict[int, int] = {}  # index -> world size of what was found there
        self._received = False

    def newest(self) -> SlotHeader | None:
        """Of the complete ones, whichever round or process wrote it."""
        held = [info.header for info in scan_slots(self._paths) if info.usable and info.header]
        return max((h for h in held if h.owner == self.owner), key=lambda header: header.iteration, default=None)

    def writable(self, keep: int, capacity: int, world_size: int) -> tuple[int, Slot]:
        """A slot with room that does not hold iteration `keep`, locked and torn.

        Slots of a world of another size than `world_size` are kept until one of this world was received, and so until
        that one is committed: what this round went on from may have lost copies.

        Raises: MemoryFull.
        """
        index = 0
        while True:
            slot = self._slots.get(index) or self._open(index, capacity)
            # Asked before its size: one that is too small may still be the one to keep.
            kept = self._iterations.get(index) == keep or self._is_of_another(world_size, index)
            if not kept and not slot.header_hold() and slot.try_lock():
                if slot.capacity < capacity:
                    slot.close()
                    slot = self._create(index, capacity)
                    slot.try_lock()
                slot.begin()
                self._iterations.pop(index, None)
                return index, slot
            index += 1

    def done(self, index: int, iteration: int) -> None:
        self._iterations[index] = iteration
        self._received = True
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
            self._worlds[index] = header.world_size
        return slot

    def _is_of_another(self, world_size: int, index: int) -> bool:
        return not self._received and self._worlds.get(index, world_size) != world_size

    def _create(self, index: int, capacity: int) -> Slot:
        path = self._paths.slot(self.owner, index)
        self._slots.pop(index, None)
        path.unlink(missing_ok=True)  # first, so that old and new never need room at the same time
        slot = self._slots[index] = Slot.create(path, capacity)
        return slot
