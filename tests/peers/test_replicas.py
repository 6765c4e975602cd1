"""Which slot a peer's shard is received into: never the one that all may have to go back to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_run.memory.header import HEADER_BYTES
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.peers.replicas import ReplicaSlots
from gemini_run.testing.slotfiles import write_slot
from gemini_run.wire import MemoryPaths

WORLD = 2  #: ranks


@pytest.fixture
def paths(tmp_path: Path) -> MemoryPaths:
    paths = MemoryPaths(tmp_path)
    paths.slots.mkdir()
    return paths


def put(paths: MemoryPaths, index: int, iteration: int, *, hold: bool = False) -> None:
    write_slot(
        paths.slot(1, index), iteration=iteration, tensors={"w": bytes(100)}, owner=1, world_size=WORLD, hold=hold
    )


def complete(paths: MemoryPaths) -> set[int]:
    return {info.header.iteration for info in scan_slots(paths) if info.usable and info.header}


@pytest.mark.parametrize("capacity", [1, 10**6])
@pytest.mark.parametrize("kept", [0, 1])
def test_the_kept_one_stays_whatever_its_size(paths: MemoryPaths, kept: int, capacity: int) -> None:
    put(paths, kept, 7)
    put(paths, 1 - kept, 6)
    replicas = ReplicaSlots(paths, 1)
    index, slot = replicas.writable(7, capacity, WORLD)
    assert (index, slot.capacity >= capacity) == (1 - kept, True)
    assert complete(paths) == {7}


@pytest.mark.parametrize("capacity", [1, 10**6])
def test_what_the_durable_tier_reads_stays(paths: MemoryPaths, capacity: int) -> None:
    put(paths, 0, 5, hold=True)
    put(paths, 1, 7)
    assert ReplicaSlots(paths, 1).writable(7, capacity, WORLD)[0] == 2
    assert complete(paths) == {5, 7}


@pytest.mark.parametrize("length", [0, 100, HEADER_BYTES])
def test_a_file_that_is_no_slot_is_replaced(paths: MemoryPaths, length: int) -> None:
    put(paths, 1, 7)
    paths.slot(1, 0).write_bytes(b"x" * length)
    index, slot = ReplicaSlots(paths, 1).writable(7, 5000, WORLD)
    assert index == 0 and slot.capacity >= 5000
    assert complete(paths) == {7}


def test_newest_is_of_that_owner_and_complete(paths: MemoryPaths) -> None:
    replicas = ReplicaSlots(paths, 1)
    assert replicas.newest() is None
    put(paths, 0, 6)
    put(paths, 1, 7)
    write_slot(paths.slot(0, 0), iteration=9, tensors={"w": bytes(100)}, owner=0, world_size=2)
    torn = Slot(paths.slot(1, 1), writable=True)
    torn.begin()
    torn.close()
    newest = replicas.newest()
    assert newest is not None and newest.iteration == 6


def test_slots_of_another_world_stay_until_one_of_this_world_was_received(paths: MemoryPaths) -> None:
    put(paths, 0, 7)
    put(paths, 1, 6)
    replicas = ReplicaSlots(paths, 1)
    index, _ = replicas.writable(7, 5000, WORLD + 1)
    assert index == 2 and complete(paths) == {6, 7}
    replicas.done(index, 8)
    assert replicas.writable(8, 5000, WORLD + 1)[0] == 0, "asked for again only once the one before is committed"
