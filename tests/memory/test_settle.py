"""Slots that borrow from another one beside them: made whole before use, and never anything but what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.settle import LenderGone, check_borrowed, fill, settle_file, settle_folder
from gemini_run.memory.slots import Slot, set_file_hold
from gemini_run.testing.slotfiles import write_slot

TENSORS = {"w": bytes(range(250)) * 40, "m": b"\x05" * 9000, "own": b"0" * 100}


def write(folder: Path, owner: int, iteration: int = 7, own: bytes = b"0" * 100, **lenders: int) -> Path:
    path = folder / f"r{owner:05d}.0"
    tensors = {**TENSORS, "own": own}
    write_slot(path, iteration=iteration, owner=owner, world_size=3, tensors=tensors, lenders=lenders)
    return path


def contents(path: Path) -> dict[str, bytes]:
    slot = Slot(path)
    header, manifest = slot.verify()
    payload = slot.payload(header)
    found = {i.name: bytes(payload[i.offset : i.offset + i.length]) for i in manifest.items}
    payload.release()
    slot.close()
    return found


def damage(path: Path, name: str) -> None:
    slot = Slot(path, writable=True)
    header = slot.header()
    [item] = [item for item in slot.manifest(header).items if item.name == name]
    slot.view[header.payload_offset + item.offset + 1] ^= 4
    slot.close()


def test_what_was_borrowed_is_copied_in(tmp_path: Path) -> None:
    other = write(tmp_path, 0, m=1, own=b"a" * 100)
    borrower = write(tmp_path, 1, w=0, own=b"b" * 100)
    header = settle_file(borrower)
    assert header.complete and header.sealed and not header.borrowed
    assert contents(borrower) == {**TENSORS, "own": b"b" * 100}
    settle_file(other)  # which lends as well as it borrows
    assert contents(other) == {**TENSORS, "own": b"a" * 100}


def test_a_slot_that_borrows_does_not_pass_for_whole(tmp_path: Path) -> None:
    write(tmp_path, 0)
    path = write(tmp_path, 1, w=0, m=0)
    slot = Slot(path)
    with pytest.raises(ReplicaCorrupt, match="2 tensors are in other slots"):
        slot.verify()
    header, manifest = slot.verify(borrowing=True)
    check_borrowed(slot, header, manifest)
    damage(path, "w")  # a place that holds nothing
    slot.verify(borrowing=True)
    damage(path, "own")
    with pytest.raises(ReplicaCorrupt, match="'own' fails its checksum"):
        slot.verify(borrowing=True)


@pytest.mark.parametrize("what", ["damaged", "gone", "gone on", "torn"])
def test_a_lender_that_does_not_have_it(tmp_path: Path, what: str) -> None:
    lender = write(tmp_path, 0)
    borrower = write(tmp_path, 1, w=0)
    if what == "damaged":
        damage(lender, "w")
    elif what == "gone":
        lender.unlink()
    elif what == "gone on":
        write(tmp_path, 0, iteration=9)
    else:
        slot = Slot(lender, writable=True)
        slot.begin()
        slot.close()
    with pytest.raises(
        ReplicaCorrupt, match=r"'w'.*fails its checksum" if what == "damaged" else "is not here"
    ) as info:
        settle_file(borrower)
    assert isinstance(info.value, LenderGone) == (what != "damaged")
    slot = Slot(borrower)
    assert slot.header().borrowed, "nothing was taken for filled"
    slot.close()


def test_a_damaged_table_of_lenders_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 0)
    path = write(tmp_path, 2, w=0)
    slot = Slot(path, writable=True)
    header = slot.header()
    slot.view[header.checksums_offset + 8 * header.num_items + 4] ^= 1
    slot.close()
    with pytest.raises(ReplicaCorrupt, match="table of lenders"):
        settle_file(path)


def test_some_can_be_filled_alone(tmp_path: Path) -> None:
    write(tmp_path, 0)
    path = write(tmp_path, 1, w=0, m=0)
    slot = Slot(path, writable=True)
    header = slot.header()
    fill(slot, header, slot.manifest(header), [0])
    payload = slot.payload(header)
    assert bytes(payload[: len(TENSORS["w"])]) == TENSORS["w"]
    payload.release()
    assert slot.header().borrowed
    slot.close()


def test_slots_of_different_nodes_fill_each_other_in_turn(tmp_path: Path) -> None:
    """Rank 0's copy is a replica from rank 1's node, rank 1's one from rank 2's."""
    paths = [write(tmp_path, 0, w=1), write(tmp_path, 1, w=2, m=2), write(tmp_path, 2)]
    settle_folder(paths)
    for path in paths:
        assert contents(path) == TENSORS


def test_nobody_has_it(tmp_path: Path) -> None:
    paths = [write(tmp_path, 0, w=1), write(tmp_path, 1, w=0)]
    with pytest.raises(ReplicaCorrupt, match="'w'"):
        settle_folder(paths)


def test_holding_a_slot_leaves_what_it_borrows(tmp_path: Path) -> None:
    write(tmp_path, 0)
    path = write(tmp_path, 1, w=0)
    assert set_file_hold(path, 7, True)
    assert settle_file(path).hold
    assert contents(path) == TENSORS
