"""What is sent between two ranks and what is borrowed from the own slot: the replica can be had whole either way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gemini_run.errors import GeminiError, MemoryFull
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.settle import settle_file
from gemini_run.memory.slots import Slot
from gemini_run.peers import transport
from gemini_run.peers.group import Peers, form
from gemini_run.peers.replicas import ReplicaSlots
from gemini_run.peers.transport import Exchange, Own, Traffic, spans
from gemini_run.plan.manifest import Manifest
from gemini_run.plan.placement import placement
from gemini_run.testing.slotfiles import manifest_of, write_slot
from gemini_run.wire import MemoryPaths

TIMEOUT = timedelta(seconds=30)


class Pair:
    """Two ranks, each on a node of its own, in two threads of this process."""

    def __init__(self, base: Path) -> None:
        self.paths = [MemoryPaths(base / f"n{rank}") for rank in range(2)]
        for paths in self.paths:
            paths.slots.mkdir(parents=True)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pool = ThreadPoolExecutor(2)
        self.manifests: dict[Any, Manifest] = {}
        self.newest = [Traffic(0, True)] * 2  #: of the last `exchange`, by rank
        self.exchanges = list(self._pool.map(self._join, range(2)))

    def _join(self, rank: int) -> Exchange:
        store = dist.TCPStore("127.0.0.1", self._store.port, is_master=False, wait_for_workers=False)
        peers = form(
            placement(2, 2), node_rank=rank, local_rank=0, first_ranks=(0, 1), store=store, prefix="p",
            store_host="127.0.0.1", timeout=TIMEOUT,
        )  # fmt: skip
        assert isinstance(peers, Peers)
        return Exchange(peers, self.paths[rank], round=0, timeout=TIMEOUT)

    def exchange(self, iteration: int, states: tuple[Mapping[str, bytes], Mapping[str, bytes]]) -> list[int]:
        """Both ranks write their slot and exchange it. Returns bytes received by each."""

        def one(rank: int) -> int:
            path = self.paths[rank].slot(rank, iteration % 2)
            tensors = states[rank]
            manifest = self.manifests.setdefault(
                (rank, tuple((n, len(t)) for n, t in tensors.items())), manifest_of(tensors, owner=rank, world_size=2)
            )
            write_slot(path, iteration=iteration, tensors=tensors, owner=rank, world_size=2, manifest=manifest)
            slot = Slot(path, writable=True)
            try:
                own = Own(slot, slot.header(), manifest)
                self.newest[rank] = self.exchanges[rank].run(own, iteration, keep=iteration - 1)
                return self.newest[rank].bytes
            finally:
                slot.close()

        return self.both(one)

    def both(self, act: Callable[[int], int]) -> list[int]:
        """`act` on either rank at once. Raises what it raised, once both are through."""
        futures = [self._pool.submit(act, rank) for rank in range(2)]
        wait(futures, 60)
        return [future.result(0) for future in futures]

    def check(self, iteration: int, states: tuple[Mapping[str, bytes], Mapping[str, bytes]]) -> None:
        """Both nodes hold both shards, every checksum right, tensor by tensor as they were."""
        for paths in self.paths:
            for owner in range(2):
                here = [i for i in scan_slots(paths) if i.usable and i.header and i.header.owner == owner]
                [path] = [i.path for i in here if i.header and i.header.iteration == iteration]
                settle_file(path)
                slot = Slot(path)
                header, manifest = slot.verify()
                payload = slot.payload(header)
                found = {i.name: bytes(payload[i.offset : i.offset + i.length]) for i in manifest.items}
                payload.release()
                assert found == dict(states[owner])
                slot.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair._pool.shutdown()


def noise(seed: int, length: int) -> bytes:
    return np.random.default_rng(seed).bytes(length)


def test_what_is_alike_is_not_sent(pair: Pair) -> None:
    shared = {f"w{i}": noise(i, 300_000) for i in range(5)}
    for iteration in (1, 2, 3):
        shared["w0"] = noise(100 + iteration, 300_000)
        states = ({**shared, "rng": noise(iteration, 5000)}, {**shared, "rng": noise(-iteration + 50, 5000)})
        received = pair.exchange(iteration, states)
        pair.check(iteration, states)
        assert all(5000 <= count < 6000 for count in received), received


def test_what_differs_is_sent(pair: Pair) -> None:
    states = ({"w": noise(1, 20_000_000), "b": b""}, {"w": noise(2, 20_000_000), "b": b""})
    assert min(pair.exchange(1, states)) >= 20_000_000
    pair.check(1, states)


def test_any_mixture_arrives_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(transport, "GAP_BYTES", 3_000)
    rng = random.Random(7)
    for iteration in range(1, 16):
        names = [f"t{i}" for i in range(rng.randrange(1, 30))]
        left = {name: noise(rng.randrange(10**6), rng.choice([0, 1, 63, 64, 65, 5000, 40_000])) for name in names}
        right = dict(left)
        for name in names:
            change = rng.random()
            if change < 0.3:
                right[name] = noise(rng.randrange(10**6), len(left[name]))
            elif change < 0.4:
                right[name] = noise(rng.randrange(10**6), len(left[name]) + 17)  # of another size
            elif change < 0.5 and len(right) > 1:
                del right[name]
            elif change < 0.6:
                right = {name: right.pop(name), **right}  # elsewhere in the payload
        right[f"only{iteration}"] = noise(1, 100)
        pair.exchange(iteration, (left, right))
        pair.check(iteration, (left, right))


def test_a_void_slot_is_not_sent_and_nothing_is_borrowed_from_it(pair: Pair) -> None:
    states = ({"w": noise(1, 50_000)}, {"w": noise(1, 50_000)})
    pair.exchange(1, states)
    traffic = []

    def one(rank: int) -> int:
        path = pair.paths[rank].slot(rank, 0)
        write_slot(path, iteration=2, tensors=states[rank], owner=rank, world_size=2)
        slot = Slot(path, writable=True)
        header = slot.header()
        own = Own(slot, header, slot.manifest(header)) if rank == 1 else None
        traffic.append((rank, pair.exchanges[rank].run(own, 2, keep=1)))
        slot.close()
        return 0

    pair.both(one)
    assert sorted((rank, t.void, t.bytes >= 50_000) for rank, t in traffic) == [(0, False, True), (1, True, False)]
    assert [sorted(held(pair.paths[1 - owner], owner)) for owner in (0, 1)] == [[1], [1, 2]]
    pair.exchange(3, states)
    pair.check(3, states)


def test_a_node_without_room_gets_no_replica_and_the_next_one_once_there_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A29: nobody waits for anybody, and both ends still agree on which manifest was sent."""
    states = ({"w": noise(1, 50_000)}, {"w": noise(1, 50_000)})
    pair.exchange(1, states)
    writable = ReplicaSlots.writable

    def full(self: ReplicaSlots, keep: int, capacity: int, world_size: int) -> tuple[int, Slot]:
        if self.owner == 0 and keep == 1:
            raise MemoryFull("full", needed_bytes=capacity, free_bytes=5)
        return writable(self, keep, capacity, world_size)

    monkeypatch.setattr(ReplicaSlots, "writable", full)
    larger = ({"w": noise(2, 60_000)}, {"w": noise(3, 60_000)})
    pair.exchange(2, larger)
    assert [(t.void, t.full is not None) for t in pair.newest] == [(False, False), (True, True)]
    assert [sorted(held(pair.paths[1 - owner], owner)) for owner in (0, 1)] == [[1], [1, 2]]
    pair.exchange(3, larger)
    pair.check(3, larger)
    assert [t.void for t in pair.newest] == [False, False]


def test_the_manifest_goes_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    swap = Exchange._swap

    def count(self: Exchange, receives: list, sends: list) -> None:
        sent.extend(tag for _, _, tag in sends if tag == transport._MANIFEST_TAG)
        swap(self, receives, sends)

    monkeypatch.setattr(Exchange, "_swap", count)
    for iteration in (1, 2, 3):
        states = ({"w": noise(iteration, 1000)}, {"w": noise(-iteration + 50, 1000)})
        pair.exchange(iteration, states)
        pair.check(iteration, states)
    assert len(sent) == 2, "one for each direction"
    states = ({"w": noise(9, 1000), "new": b"x"}, {"w": noise(8, 1000)})
    pair.exchange(4, states)
    pair.check(4, states)
    assert len(sent) == 3


def test_a_flipped_bit_on_the_way_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    accept = transport._accept
    once = threading.Lock()

    def flip(entry: transport.Incoming) -> None:
        if once.acquire(blocking=False):
            entry.slot.view[entry.header.payload_offset] ^= 1
        accept(entry)

    monkeypatch.setattr(transport, "_accept", flip)
    states = ({"w": noise(1, 1000)}, {"w": noise(2, 1000)})
    with pytest.raises(GeminiError, match="'w' fails its checksum"):
        pair.exchange(1, states)
    torn = [info for paths in pair.paths for info in scan_slots(paths) if info.torn]
    assert len(torn) == 1


def test_spans_go_over_small_gaps_only() -> None:
    manifest = manifest_of({"a": bytes(100), "b": bytes(100), "c": bytes(100_000), "d": bytes(10), "e": b""})
    offsets = [item.offset for item in manifest.items]
    assert spans(manifest, np.array([1, 0, 0, 1, 1], np.uint8)) == [(0, 100), (offsets[3], offsets[3] + 10)]
    assert spans(manifest, np.array([1, 0, 1, 0, 0], np.uint8)) == [(0, offsets[2] + 100_000)]
    assert spans(manifest, np.zeros(5, np.uint8)) == []


def held(paths: MemoryPaths, owner: int) -> dict[int, int]:
    """Iteration -> round of the complete slots of `owner`."""
    found = [i.header for i in scan_slots(paths) if i.usable and i.header and i.header.owner == owner]
    return {header.iteration: header.round for header in found}


def renew(pair: Pair, iteration: int) -> list[int]:
    """As at the start of a round, with what lies in memory. Returns bytes received by each."""

    def one(rank: int) -> int:
        [path] = [i.path for i in scan_slots(pair.paths[rank]) if i.usable and i.header
                  and (i.header.owner, i.header.iteration) == (rank, iteration)]  # fmt: skip
        slot = Slot(path, writable=True)
        try:
            header = slot.header()
            return pair.exchanges[rank].renew(Own(slot, header, slot.manifest(header))).bytes
        finally:
            slot.close()

    return pair.both(one)


def states_of(iteration: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    return {"w": noise(iteration, 5000)}, {"w": noise(1000 + iteration, 5000)}


def write_own(pair: Pair, rank: int, iteration: int) -> None:
    path = pair.paths[rank].slot(rank, iteration % 2)
    write_slot(path, iteration=iteration, tensors=states_of(iteration)[rank], owner=rank, world_size=2)


def test_what_a_round_goes_on_from_reaches_peers_that_lack_it(pair: Pair) -> None:
    for iteration in (1, 2):
        pair.exchange(iteration, states_of(iteration))
    for rank in range(2):
        write_own(pair, rank, 3)  # complete at home when a worker died: no replicas
    assert min(renew(pair, 3)) >= 5000
    pair.check(3, states_of(3))
    # The newest replica that there was is what all could have gone back to until now.
    assert [sorted(held(pair.paths[1 - owner], owner)) for owner in range(2)] == [[2, 3], [2, 3]]
    pair.exchange(4, states_of(4))
    pair.check(4, states_of(4))


def test_a_peer_that_holds_it_is_sent_nothing(pair: Pair) -> None:
    for iteration in (1, 2):
        pair.exchange(iteration, states_of(iteration))
    before = [{i.path: i.path.read_bytes() for i in scan_slots(paths)} for paths in pair.paths]
    assert renew(pair, 2) == [0, 0]
    after = [{i.path: i.path.read_bytes() for i in scan_slots(paths)} for paths in pair.paths]
    assert after == before, "to the number of times that each was written"
    # One alone lacks it, as a node that has just replaced another.
    for info in scan_slots(pair.paths[1]):
        if info.header and info.header.owner == 0:
            slot = Slot(info.path, writable=True)
            slot.refuse()
            slot.close()
    received = renew(pair, 2)
    assert received[0] == 0 and received[1] >= 5000
    for iteration in (3, 4):
        pair.exchange(iteration, states_of(iteration))
        pair.check(iteration, states_of(iteration))


def test_another_slot_of_the_same_iteration_does_not_pass_for_it(pair: Pair) -> None:
    pair.exchange(1, states_of(1))
    pair.exchange(2, states_of(2))
    for rank in range(2):  # the same iteration again, other bytes
        path = pair.paths[rank].slot(rank, 0)
        write_slot(path, iteration=2, tensors=states_of(7)[rank], owner=rank, world_size=2)
    renew(pair, 2)
    for rank in range(2):
        for info in scan_slots(pair.paths[rank]):
            assert info.header and info.usable
    replicas = [i.header.iteration for i in scan_slots(pair.paths[1]) if i.header and i.header.owner == 0]
    assert replicas == [2, 2], "the new one beside the old"
