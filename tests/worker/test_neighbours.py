"""Two and three ranks of one node compare their slots: what each copies next time, and when an iteration is void."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Manifest
from gemini_run.testing.slotfiles import manifest_of, write_slot
from gemini_run.wire import MemoryPaths
from gemini_run.worker.neighbours import Neighbours, Verdict

State = dict[str, bytes]


class Node:
    """All ranks of a node, global ranks 4 and up."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.paths = MemoryPaths(folder)
        self.paths.slots.mkdir(parents=True)
        self.owners = range(4, 4 + ranks)
        self.neighbours = [Neighbours(self.paths, owner=owner, owners=self.owners) for owner in self.owners]
        self.manifests: dict[tuple[object, ...], Manifest] = {}
        self.verdicts: list[Verdict] = []

    def snapshot(self, iteration: int, *states: State) -> list[Verdict]:
        """Every rank writes its slot, borrowing what it was told to, then all compare."""
        manifests, opened = [], []
        for index, (owner, state) in enumerate(zip(self.owners, states, strict=True)):
            key = (owner, tuple((name, len(data)) for name, data in state.items()))
            manifest = self.manifests.setdefault(key, manifest_of(state, owner=owner, world_size=9))
            path = self.paths.slot(owner, iteration % 2)
            write_slot(path, iteration=iteration, owner=owner, world_size=9, tensors=state, manifest=manifest,
                       lenders=self.borrows(index, manifest))  # fmt: skip
            manifests.append(manifest)
            opened.append(Slot(path, writable=True))
        self.verdicts = [
            neighbours.compare(slot, slot.header(), manifest)
            for neighbours, slot, manifest in zip(self.neighbours, opened, manifests, strict=True)
        ]
        for slot in opened:
            slot.close()
        return self.verdicts

    def borrows(self, index: int, manifest: Manifest) -> Mapping[str, int]:
        """Tensor -> lender, as the verdict before says."""
        borrowing = self.verdicts[index].borrowing if self.verdicts else None
        if borrowing is None or borrowing.manifest is not manifest:
            return {}
        pairs = zip(manifest.items, borrowing.lenders, strict=True)
        return {item.name: lender for item, lender in pairs if lender >= 0}

    def told(self) -> list[dict[str, int]]:
        return [dict(self.borrows(index, verdict.borrowing.manifest))
                for index, verdict in enumerate(self.verdicts) if verdict.borrowing]  # fmt: skip


def state(seed: int, **changed: bytes) -> State:
    rng = np.random.default_rng(seed)
    return {**{f"w{i}": rng.bytes(10_000) for i in range(4)}, "small": b"abc", **changed}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "n", 2)


def test_each_copies_half_of_what_both_hold(node: Node) -> None:
    for iteration in (1, 2, 3):
        verdicts = node.snapshot(iteration, state(iteration), state(iteration))
        assert not any(verdict.void or verdict.parted for verdict in verdicts)
        first, second = node.told()
        assert set(first) | set(second) == {"w0", "w1", "w2", "w3"} and not set(first) & set(second)
        assert set(first.values()) == {5} and set(second.values()) == {4}


def test_what_differs_is_not_borrowed(node: Node) -> None:
    node.snapshot(1, state(1, rng=bytes(6000)), state(1, rng=b"x" * 6000))
    assert all("rng" not in told for told in node.told())


def test_the_first_difference_voids_the_iteration_of_who_borrowed(node: Node) -> None:
    node.snapshot(1, state(1), state(1))
    borrower = next(index for index, told in enumerate(node.told()) if "w2" in told)
    states = [state(2), state(2)]
    states[1]["w2"] = b"!" + states[1]["w2"][1:]
    verdicts = node.snapshot(2, *states)
    assert [verdict.void for verdict in verdicts] == [index == borrower for index in range(2)]
    assert [verdict.parted for verdict in verdicts] == [("w2",)] * 2
    assert all("w2" not in told for told in node.told())
    verdicts = node.snapshot(3, state(3), state(3))  # alike again: once is enough
    assert not any(verdict.void or verdict.parted for verdict in verdicts)
    assert all("w2" not in told for told in node.told())
    assert sorted(name for told in node.told() for name in told) == ["w0", "w1", "w3"]


def test_a_tensor_that_only_the_lender_lost(node: Node) -> None:
    node.snapshot(1, state(1), state(1))
    lender = next(index for index, told in enumerate(node.told()) if "w1" not in told)
    states = [state(2), state(2)]
    del states[lender]["w1"]
    verdicts = node.snapshot(2, *states)
    assert [verdict.void for verdict in verdicts] == [index != lender for index in range(2)]
    verdicts = node.snapshot(3, state(3), state(3))
    assert not any(verdict.void for verdict in verdicts)


def test_a_new_structure_is_compared_anew(node: Node) -> None:
    node.snapshot(1, state(1), state(1))
    verdicts = node.snapshot(2, state(2, new=bytes(9000)), state(2, new=bytes(9000)))
    assert not any(verdict.void for verdict in verdicts)
    assert sorted(name for told in node.told() for name in told) == ["new", "w0", "w1", "w2", "w3"]


def test_two_of_three_hold_alike(tmp_path: Path) -> None:
    node = Node(tmp_path / "n", 3)
    for iteration in (1, 2, 3):
        alike, other = state(iteration), state(iteration, w0=b"o" * 10_000)
        verdicts = node.snapshot(iteration, alike, other, alike)
        assert not any(verdict.void or verdict.parted for verdict in verdicts)
        told = node.told()
        assert "w0" not in told[1] and len({"w0"} & (set(told[0]) | set(told[2]))) == 1
        assert told[0].get("w0", 6) == 6 and told[2].get("w0", 4) == 4
        assert sum(len(t) for t in told) == 3 * 2 + 1


def test_a_neighbour_whose_slot_is_not_there(node: Node) -> None:
    node.snapshot(1, state(1), state(1))
    path = node.paths.slot(4, 1)
    slot = Slot(path, writable=True)
    node.paths.slot(5, 1).unlink()
    header = slot.header()
    with pytest.raises(ReplicaCorrupt, match="rank 5's slot of iteration 1 is not here"):
        node.neighbours[0].compare(slot, header, slot.manifest(header))
    slot.close()


def test_what_is_each_ranks_own_is_never_borrowed(tmp_path: Path) -> None:
    """Equal by chance, and different the next time: neither news nor void."""
    node = Node(tmp_path, 2)
    node.neighbours = [
        Neighbours(node.paths, owner=owner, owners=node.owners, private=["rng.", "loader."]) for owner in node.owners
    ]
    own = {"rng.torch": bytes(5000), "loader.start": bytes(8192)}
    node.snapshot(1, state(1, **own), state(1, **own))
    assert all("rng.torch" not in told and "loader.start" not in told for told in node.told())
    assert any(told.values() for told in node.told())
    other = {"rng.torch": bytes([1]) * 5000, "loader.start": bytes([1]) * 8192}
    verdicts = node.snapshot(2, state(1, **own), state(1, **other))
    assert [(v.void, v.parted) for v in verdicts] == [(False, ())] * 2
