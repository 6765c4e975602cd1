"""Which file a snapshot goes into: never one that is still needed, and never more files than that takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_run.errors import MemoryFull
from gemini_run.memory.header import HEADER_BYTES, build_header
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot, set_file_hold
from gemini_run.wire import MemoryPaths
from gemini_run.worker.frozen import Contents
from gemini_run.worker.ownslots import OwnSlots

OWNER = 3


class Pins:
    """Which slots a device could reach."""

    def __init__(self) -> None:
        self.pinned: list[Slot] = []

    def pin(self, slot: Slot) -> None:
        self.pinned.append(slot)

    def unpin(self, slot: Slot) -> None:
        assert slot.view.nbytes, "still mapped"
        self.pinned.remove(slot)


class Rank:
    """A rank's slots, without a state: what it writes is a header."""

    def __init__(self, folder: Path) -> None:
        self.paths = MemoryPaths(folder)
        self.paths.slots.mkdir(parents=True, exist_ok=True)
        self.pins = Pins()
        self.slots = OwnSlots(self.paths, OWNER, Contents())
        self.slots.pin(self.pins)  # type: ignore[arg-type]

    def snapshot(self, iteration: int, *, keep: int | None = None, hold: bool = False, needed: int = 5000) -> int:
        """As the training thread does. Returns the index of the file."""
        index, slot = self.slots.writable(iteration - 1 if keep is None else keep, needed)
        slot.begin()
        slot.commit(build_header(
            manifest_text=b"", num_items=0, payload_length=0, objects=b"", round=0, iteration=iteration, owner=OWNER,
            world_size=4, hold=hold,
        ))  # fmt: skip
        self.slots.wrote(index, iteration, hold=hold)
        slot.unlock()
        return index

    def released(self, iteration: int) -> None:
        """The durable tier has that one."""
        done = [set_file_hold(info.path, iteration, False) for info in scan_slots(self.paths)]
        assert done.count(True) == 1

    def held(self) -> dict[int, int]:
        """Index -> iteration of the complete ones."""
        found = {int(i.path.suffix[1:]): i.header for i in scan_slots(self.paths) if i.usable}
        return {index: header.iteration for index, header in found.items() if header}

    def settled(self) -> list[str]:
        """File names, once the thread that makes and frees them is through."""
        self.slots._thread.submit(int).result(30)
        return sorted(path.name for path in self.paths.slots.iterdir())


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    rank = Rank(tmp_path)
    rank.slots.make(10_000)
    return rank


def names(*indices: int) -> list[str]:
    return [f"r00003.{index}" for index in indices]


def test_two_files_take_turns(rank: Rank) -> None:
    assert rank.settled() == names(0, 1)
    assert [rank.snapshot(iteration) for iteration in range(1, 6)] == [0, 1, 0, 1, 0]
    assert rank.settled() == names(0, 1)


def test_a_third_is_there_before_it_is_needed_and_gone_after(rank: Rank) -> None:
    assert [rank.snapshot(1), rank.snapshot(2, hold=True)] == [0, 1]
    assert rank.settled() == names(0, 1, 2)
    assert [rank.snapshot(iteration) for iteration in (3, 4, 5)] == [0, 2, 0]
    assert rank.held() == {0: 5, 1: 2, 2: 4}
    rank.released(2)
    assert rank.snapshot(6) == 1, "one that is mapped, before any other"
    assert rank.settled() == names(0, 1)
    assert len(rank.pins.pinned) == 2 and not list(rank.paths.slots.glob(".*"))
    assert [rank.snapshot(iteration) for iteration in (7, 8)] == [0, 1]


def test_whichever_is_left_over_goes(rank: Rank) -> None:
    rank.snapshot(1)
    rank.snapshot(2, hold=True)
    assert [rank.snapshot(iteration) for iteration in (3, 4)] == [0, 2]
    rank.released(2)
    assert rank.snapshot(5) == 0
    assert rank.settled() == names(0, 2), "the newest committed one stays, wherever it is"
    assert [rank.snapshot(iteration) for iteration in (6, 7)] == [2, 0]
    assert rank.settled() == names(0, 2)
    again = Rank(rank.paths.root)
    again.slots.make(10_000)
    assert again.settled() == names(0, 2), "an earlier process's files are taken, wherever they are"


def test_one_that_nobody_needed_after_all_goes(rank: Rank) -> None:
    rank.snapshot(1)
    rank.snapshot(2, hold=True)
    rank.released(2)
    assert rank.snapshot(3) == 0
    assert rank.settled() == names(0, 1)


def test_further_files_of_an_earlier_process_go_once_they_are_not_held(rank: Rank) -> None:
    rank.snapshot(1)
    rank.snapshot(2, hold=True)
    rank.snapshot(3)
    assert rank.snapshot(4) == 2
    again = Rank(rank.paths.root)
    again.slots.adopt(2, Slot(rank.paths.slot(OWNER, 2), writable=True), 4)
    again.slots.make(10_000)
    assert again.snapshot(5) == 0
    assert again.held() == {0: 5, 1: 2, 2: 4}, "still being stored"
    rank.released(2)
    assert again.snapshot(6) == 2
    assert again.settled() == names(0, 2)


def test_a_file_of_an_earlier_process_that_was_taken_over_is_no_stray_any_more(rank: Rank) -> None:
    rank.snapshot(1)
    rank.snapshot(2, hold=True)
    rank.snapshot(3)
    rank.snapshot(4)
    again = Rank(rank.paths.root)
    again.slots.adopt(2, Slot(rank.paths.slot(OWNER, 2), writable=True), 4)
    again.slots.make(10_000)
    assert [again.snapshot(5), again.snapshot(6, hold=True)] == [0, 2]
    again.settled()  # file 1 is about to be the third one
    rank.released(2)
    assert [again.snapshot(7), again.snapshot(8)] == [0, 1]
    assert again.held() == {0: 7, 1: 8, 2: 6}


def test_a_file_that_is_being_read_stays(rank: Rank) -> None:
    rank.snapshot(1)
    rank.snapshot(2, hold=True)
    rank.snapshot(3)
    rank.snapshot(4)
    reader = Slot(rank.paths.slot(OWNER, 1))
    assert reader.try_lock(shared=True)
    rank.released(2)
    assert rank.snapshot(5) == 0
    assert rank.settled() == names(0, 1, 2)
    reader.close()
    assert rank.snapshot(6) in (1, 2)
    assert len(rank.settled()) == 2


def test_no_room_for_the_third_leaves_the_other_two_as_they_are(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A29."""
    create = Slot.create

    def full(path: Path, capacity: int) -> Slot:
        raise MemoryFull("full", needed_bytes=capacity, free_bytes=HEADER_BYTES)

    rank.snapshot(1)
    monkeypatch.setattr(Slot, "create", full)
    rank.snapshot(2, hold=True)
    rank.snapshot(3)
    for _ in range(2):
        with pytest.raises(MemoryFull):
            rank.snapshot(4, keep=3)
        assert rank.held() == {0: 3, 1: 2}
    monkeypatch.setattr(Slot, "create", create)
    assert rank.snapshot(5, keep=3) == 2


def test_no_room_to_grow_leaves_the_newest(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A29: the file that should have grown is gone, and made anew when there is room."""
    create = Slot.create

    def full(path: Path, capacity: int) -> Slot:
        raise MemoryFull("full", needed_bytes=capacity, free_bytes=HEADER_BYTES)

    rank.snapshot(1)
    rank.snapshot(2)
    monkeypatch.setattr(Slot, "create", full)
    for _ in range(2):
        with pytest.raises(MemoryFull):
            rank.snapshot(3, needed=50_000, keep=2)
    assert rank.held() == {1: 2}
    monkeypatch.setattr(Slot, "create", create)
    assert [rank.snapshot(4, needed=50_000, keep=2), rank.snapshot(5, needed=50_000)] == [0, 1]
    assert rank.settled() == names(0, 1)
