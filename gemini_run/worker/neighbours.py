"""The ranks of one node: which tensors they hold alike, proved anew at every snapshot, and who copies them.

Each rank takes the checksums of its whole state at the boundary, and copies only what no other rank of the node
copies for it. Before the iteration counts as committed the checksums of all are compared. Where ranks that held a
tensor alike do not any more, the iteration has no copy of some rank's: it is void, the one before stays, and from
then on each of them copies that tensor itself.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.header import SlotHeader
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Manifest
from gemini_run.plan.share import MIN_BYTES, lenders
from gemini_run.wire import MemoryPaths

Sums = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]


@dataclasses.dataclass(frozen=True)
class Borrowing:
    """What a rank need not copy.

    Attributes:
        manifest: that it is for.
        lenders: per item the global rank that copies it on this node, -1 = this one does.
    """

    manifest: Manifest
    lenders: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one snapshot.

    Attributes:
        void: this rank's slot borrows something that the lender does not hold alike.
        parted: names of the tensors that ranks of this node held alike and do not any more.
        borrowing: for the next snapshot.
    """

    void: bool
    parted: tuple[str, ...]
    borrowing: Borrowing | None


@dataclasses.dataclass
class _Catalogue:
    """The tensors that two ranks or more have under one name and length.

    Attributes:
        names, lengths: of each.
        index: [rank, tensor] its index in the rank's manifest, -1 = it has none.
    """

    names: list[str]
    lengths: list[int]
    index: Indices


@dataclasses.dataclass(frozen=True)
class _Loans:
    """Local rank -> which of this rank's items are borrowed from it, and which of that rank's they are (-1 = none).

    `key`: of the manifests and the table of lenders that it was made from.
    """

    key: tuple[int, ...]
    pairs: dict[int, tuple[Indices, Indices]]


class Neighbours:
    """Of one rank. Runs on the commit thread, at the same iterations in all ranks of the node."""

    def __init__(self, paths: MemoryPaths, *, owner: int, owners: Sequence[int], private: Sequence[str] = ()) -> None:
        """
        Args:
            owner: this rank.
            owners: all ranks of the node, this one included, in order.
            private: names of tensors begin so that are each rank's own, and equal by chance only; alike on all ranks.
        """
        self._private = tuple(private)
        self._paths = paths
        self._owners = tuple(owners)
        self._me = self._owners.index(owner)
        self.first = self._me == 0  #: of the node's ranks
        self._manifests: dict[int, tuple[int, Manifest]] = {}  # local rank -> checksum of its text, parsed
        self._known: tuple[int, ...] = ()  # the manifests' checksums, of the catalogue
        self._catalogue = _Catalogue([], [], np.empty((0, 0), np.intp))
        self._classes: Indices | None = None
        self._parted: set[str] = set()  # never borrowed again
        self._borrowing: Borrowing | None = None
        self._loans = _Loans((), {})

    def compare(self, slot: Slot, header: SlotHeader, manifest: Manifest) -> Verdict:
        """Compare this rank's sealed `slot` with those of the others, which all hold the same iteration.

        Raises:
            ReplicaCorrupt: a neighbour's slot is not there, or fails a checksum.
        """
        sums = self._sums(slot, header, manifest)
        known = tuple(self._manifests[rank][0] for rank in range(len(self._owners)))
        if known != self._known:
            self._known, self._catalogue = known, self._make_catalogue()
            self._classes = None
        void = self._void(slot, header, manifest, sums)
        classes = self._classify(sums)
        parted: tuple[str, ...] = ()
        # Only on what all ranks of the node see alike: they must come to one decision.
        if self._classes is None or not np.array_equal(classes, self._classes):
            parted = self._note_parted(classes)
            self._classes = classes
            self._borrowing = self._decide(manifest, classes)
        elif self._borrowing is None or self._borrowing.manifest is not manifest:
            self._borrowing = self._decide(manifest, classes)
        return Verdict(void, parted, self._borrowing)

    # --- what the others hold ---------------------------------------------------------------------------

    def _sums(self, slot: Slot, header: SlotHeader, manifest: Manifest) -> list[Sums]:
        """The checksums of every local rank."""
        infos = {
            info.header.owner: (info.path, info.header)
            for info in scan_slots(self._paths)
            if info.usable and info.header and info.header.iteration == header.iteration
        }
        found = []
        for rank, owner in enumerate(self._owners):
            if rank == self._me:
                self._manifests[rank] = (header.manifest_checksum, manifest)
                found.append(np.array(slot.stored_checksums(header), np.uint64))
            elif owner in infos:
                found.append(self._read(rank, *infos[owner]))
            else:
                raise ReplicaCorrupt(
                    f"{self._paths.slots}: rank {owner}'s slot of iteration {header.iteration} is not here"
                )
        return found

    def _read(self, rank: int, path: Path, header: SlotHeader) -> Sums:
        """A neighbour's checksums, by reading and not by mapping its slot: it may remake the file at any time."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ReplicaCorrupt(f"{path}: gone") from error
        try:
            known = self._manifests.get(rank)
            if known is None or known[0] != header.manifest_checksum:
                text = os.pread(descriptor, header.manifest_length, header.manifest_offset)
                self._manifests[rank] = (header.manifest_checksum, Manifest.from_json(text))
            return np.frombuffer(os.pread(descriptor, 8 * header.num_items, header.checksums_offset), np.uint64)
        finally:
            os.close(descriptor)

    def _make_catalogue(self) -> _Catalogue:
        places: dict[tuple[str, int], dict[int, int]] = {}
        for rank in range(len(self._owners)):
            for index, item in enumerate(self._manifests[rank][1].items):
                if item.length >= MIN_BYTES and not item.name.startswith(self._private):
                    places.setdefault((item.name, item.length), {})[rank] = index
        shared = {key: where for key, where in places.items() if len(where) > 1}
        positions = np.full((len(self._owners), len(shared)), -1, np.intp)
        for column, where in enumerate(shared.values()):
            for rank, position in where.items():
                positions[rank, column] = position
        return _Catalogue([name for name, _ in shared], [length for _, length in shared], positions)

    # --- what follows from it ---------------------------------------------------------------------------

    def _classify(self, sums: Sequence[Sums]) -> Indices:
        """[rank, tensor]: the first rank that holds the same bytes, -1 where a rank has no such tensor."""
        index = self._catalogue.index
        classes = np.full(index.shape, -1, np.intp)
        found = [sums[rank][index[rank]] if len(sums[rank]) else np.zeros(index.shape[1], np.uint64)
                 for rank in range(len(sums))]  # fmt: skip
        for rank in range(len(sums)):
            classes[rank] = np.where(index[rank] >= 0, rank, -1)
            for other in range(rank - 1, -1, -1):  # downwards, so that the first one stays
                alike = (found[rank] == found[other]) & (index[rank] >= 0) & (index[other] >= 0)
                classes[rank][alike] = classes[other][alike]
        return classes

    def _note_parted(self, classes: Indices) -> tuple[str, ...]:
        if self._classes is None:
            return ()
        before, now = self._classes, classes
        parted = []
        for column in np.flatnonzero((before != now).any(axis=0)):
            pairs = {(b, n) for b, n in zip(before[:, column].tolist(), now[:, column].tolist(), strict=True)}
            if len({b for b, _ in pairs}) < len(pairs):  # one class has become two
                parted.append(self._catalogue.names[column])
        self._parted.update(parted)
        return tuple(parted)

    def _decide(self, manifest: Manifest, classes: Indices) -> Borrowing:
        catalogue = self._catalogue
        columns = [c for c, name in enumerate(catalogue.names) if name not in self._parted]
        chosen = lenders([catalogue.lengths[c] for c in columns], [classes[:, c].tolist() for c in columns])
        result = [-1] * len(manifest.items)
        for column, row in zip(columns, chosen, strict=True):
            position = int(catalogue.index[self._me, column])
            if position >= 0 and row[self._me] != self._me:
                result[position] = self._owners[row[self._me]]
        return Borrowing(manifest, tuple(result))

    def _void(self, slot: Slot, header: SlotHeader, manifest: Manifest, sums: Sequence[Sums]) -> bool:
        if not header.borrowed:
            return False
        key = (*self._known, header.borrowed)
        if self._loans.key != key:
            self._loans = _Loans(key, self._find_loans(slot, header, manifest))
        mine = sums[self._me]
        return any(
            (at < 0).any() or not np.array_equal(mine[index], sums[rank][at])
            for rank, (index, at) in self._loans.pairs.items()
        )

    def _find_loans(self, slot: Slot, header: SlotHeader, manifest: Manifest) -> dict[int, tuple[Indices, Indices]]:
        ranks = {owner: rank for rank, owner in enumerate(self._owners)}
        places: dict[int, dict[tuple[str, int], int]] = {}
        pairs: dict[int, list[tuple[int, int]]] = {}
        for index, lender in enumerate(slot.lenders(header)):
            if lender < 0:
                continue
            rank, item = ranks[lender], manifest.items[index]
            if rank not in places:
                theirs = self._manifests[rank][1].items
                places[rank] = {(other.name, other.length): at for at, other in enumerate(theirs)}
            pairs.setdefault(rank, []).append((index, places[rank].get((item.name, item.length), -1)))
        return {
            rank: (np.array([i for i, _ in found], np.intp), np.array([at for _, at in found], np.intp))
            for rank, found in pairs.items()
        }
