"""The slots of this rank's own shard: which file the next snapshot goes into, and how many there are.

Two are made before the first step. While one is held for the durable tier there is a third: made by a thread of its
own, since new pages cost several times the copy into them, and given back once nothing is held any more.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from gemini_run.errors import FormatVersionError, MemoryFull, ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, SlotHeader
from gemini_run.memory.segment import SLOTS_PER_REPLICA, scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.wire import MemoryPaths
from gemini_run.worker.device import DeviceCopier
from gemini_run.worker.frozen import Contents
from gemini_run.worker.layout import address_of

OBJECTS_RESERVE = 64 * 1024  #: bytes; room for the object state to grow before a slot is remade


class OwnSlots:
    """Slot files of one rank, by index. Of the training thread alone."""

    def __init__(self, paths: MemoryPaths, owner: int, contents: Contents) -> None:
        """Args: contents: is told of every file that is not what it was."""
        self._paths = paths
        self._owner = owner
        self._contents = contents
        self._devices: DeviceCopier | None = None
        self._slots: dict[int, Slot] = {}
        self._addresses: dict[int, int] = {}
        self._iterations: dict[int, int] = {}
        self._thread = ThreadPoolExecutor(1, "gemini-slots")
        self._coming: tuple[int, Future[Slot]] | None = None
        self._strays: set[int] | None = None  # files beyond the usual that an earlier process left, None = not looked

    def pin(self, devices: DeviceCopier) -> None:
        """Let `devices` reach all of them, also those to come."""
        self._devices = devices
        for slot in self._slots.values():
            devices.pin(slot)

    def address(self, index: int) -> int:
        """Of the mapping's first byte."""
        return self._addresses[index]

    def holding(self) -> bool:
        """Whether one is held for the durable tier, also one that an earlier round wrote."""
        return any(
            info.usable and info.header and info.header.owner == self._owner and info.header.hold
            for info in scan_slots(self._paths)
        )

    def adopt(self, index: int, slot: Slot, iteration: int) -> None:
        """The one that this rank restored from: kept until a newer iteration is committed."""
        self._slots[index] = slot
        self._addresses[index] = address_of(slot.view)
        self._iterations[index] = iteration

    def spare(self, index: int, iteration: int) -> None:
        """Do not write into this file before an iteration newer than `iteration` is committed."""
        self._iterations[index] = iteration

    def make(self, capacity: int) -> None:
        """Have two, of so many bytes, where nothing is to be kept.

        Raises: MemoryFull.
        """
        restored = bool(self._slots)
        for index in (*self._files(), *range(SLOTS_PER_REPLICA)):
            if len(self._slots.keys() | self._iterations.keys()) >= SLOTS_PER_REPLICA:
                break
            if index in self._slots or index in self._iterations:
                continue
            slot = self._open(index, capacity)
            # Beside the restored slot lies the iteration before, which stays until that one has replicas.
            if not restored and not capacity <= slot.capacity <= 2 * capacity:
                self._remake(index, capacity)

    def writable(self, keep: int, needed: int) -> tuple[int, Slot]:
        """One that holds neither iteration `keep` nor anything the durable tier wants, with room, locked.

        Raises:
            MemoryFull: it does not exist yet, or is too small, and there is no room for it.
        """
        # Rather one that is mapped than one whose pages are still to be made.
        unmapped = (index for index in itertools.count() if index not in self._slots)
        for index in itertools.chain(sorted(self._slots), unmapped):
            if self._iterations.get(index) == keep:
                continue
            slot = self._slots.get(index) or self._open(index, needed + OBJECTS_RESERVE)
            if not slot.header_hold() and slot.try_lock():
                if slot.capacity < needed:
                    slot = self._remake(index, needed + OBJECTS_RESERVE)
                    slot.try_lock()
                self._iterations.pop(index, None)
                self._give_back(keep, index)
                return index, slot
        raise AssertionError("itertools.count ends never")

    def wrote(self, index: int, iteration: int, *, hold: bool) -> None:
        """A snapshot lies there now. `hold`: it will be held for a while, so a further slot is begun."""
        self._iterations[index] = iteration
        if hold and len(self._slots) <= SLOTS_PER_REPLICA and self._coming is None:
            further = next(i for i in range(len(self._slots) + 1) if i not in self._slots)
            capacity = self._slots[index].capacity
            self._coming = further, self._thread.submit(_open_or_create, self._path(further), capacity)

    # --- files ----------------------------------------------------------------------------------------

    def _open(self, index: int, capacity: int) -> Slot:
        """Take over the file that is there, of whatever size, its pages already made; else make one."""
        if self._coming is not None and self._coming[0] == index:
            (_, coming), self._coming = self._coming, None
            return self._take(index, coming.result())
        return self._take(index, _open_or_create(self._path(index), capacity))

    def _remake(self, index: int, capacity: int) -> Slot:
        path = self._path(index)
        if (old := self._slots.pop(index, None)) is not None:
            self._unpin(old)
            old.close()
        path.unlink(missing_ok=True)  # first, so that old and new never need room at the same time
        return self._take(index, Slot.create(path, capacity))

    def _take(self, index: int, slot: Slot) -> Slot:
        self._slots[index] = slot
        self._addresses[index] = address_of(slot.view)
        self._contents.forget(index)
        if self._devices is not None:
            self._devices.pin(slot)
        return slot

    def _unpin(self, slot: Slot) -> None:
        """Before it is unmapped."""
        if self._devices is not None:
            self._devices.unpin(slot)

    def _give_back(self, keep: int, writing: int) -> None:
        """Remove every file but the usual number, once neither a snapshot nor the durable tier needs it."""
        if self._coming is not None and not any(slot.header_hold() for slot in self._slots.values()):
            (index, coming), self._coming = self._coming, None
            self._thread.submit(_discard, coming, self._path(index))
        if len(self._slots) > SLOTS_PER_REPLICA:
            for index, slot in list(self._slots.items()):
                if index == writing or self._iterations.get(index) == keep or slot.header_hold():
                    continue
                if slot.try_lock():  # else somebody reads it
                    del self._slots[index], self._addresses[index]
                    self._iterations.pop(index, None)
                    self._path(index).unlink(missing_ok=True)
                    self._unpin(slot)
                    self._thread.submit(slot.close)  # frees its pages, which takes a while
        if self._strays is None:
            self._strays = set(self._files()) - self._slots.keys()
        self._strays -= self._slots.keys()
        if self._coming is not None:
            self._strays.discard(self._coming[0])  # it may be mapped already
        for index in list(self._strays):
            if self._iterations.get(index) != keep and _remove_unless_wanted(self._path(index), keep):
                self._strays.discard(index)

    def _path(self, index: int) -> Path:
        return self._paths.slot(self._owner, index)

    def _files(self) -> list[int]:
        """Indices of the files that are there."""
        first = self._path(0)
        found = [int(path.suffix[1:]) for path in first.parent.glob(f"{first.stem}.*")]
        return sorted(found)


def _open_or_create(path: Path, capacity: int) -> Slot:
    try:
        return Slot(path, writable=True)
    except (FileNotFoundError, ReplicaCorrupt):  # none, or a file too short to be one
        path.unlink(missing_ok=True)
        return Slot.create(path, capacity)


def _discard(coming: Future[Slot], path: Path) -> None:
    """It was made, or just taken over, for nothing."""
    try:
        slot = coming.result()
    except MemoryFull:
        return  # there is nothing
    path.unlink(missing_ok=True)
    slot.close()


def _remove_unless_wanted(path: Path, keep: int) -> bool:
    header: SlotHeader | None = None
    try:
        with path.open("rb") as file:
            header = SlotHeader.unpack(file.read(HEADER_BYTES))
    except FormatVersionError:
        return True  # not ours to judge
    except (FileNotFoundError, ReplicaCorrupt):
        pass  # nothing worth keeping
    if header is not None and header.complete and (header.hold or header.iteration == keep):
        return False
    path.unlink(missing_ok=True)
    return True
