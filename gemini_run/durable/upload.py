"""From slots to the durable tier: what a node stores of one iteration, and the commit by the root."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from gemini_run.durable import layout
from gemini_run.durable.layout import Marker, Place, RankRecord, StoredFile
from gemini_run.durable.tier import DurableTier, Source
from gemini_run.errors import DurableError, ReplicaCorrupt
from gemini_run.memory.header import SlotHeader
from gemini_run.memory.settle import settle_file
from gemini_run.memory.slots import Slot
from gemini_run.plan.persist import Assignment, Shard

LOCK_PATIENCE = 2.0  #: seconds to wait for a slot's flock
_DIGEST_CHUNK = 16 << 20


class SlotReader:
    """One sealed slot of one iteration, kept from writers (shared flock) while it is open.

    Attributes:
        shard: manifest and checksums.
    """

    def __init__(self, path: Path, iteration: int) -> None:
        """Raises: DurableError if the slot is being written, or holds another iteration; ReplicaCorrupt."""
        try:
            self.slot = Slot(path)
        except FileNotFoundError as error:
            raise DurableError(f"{path}: the slot of iteration {iteration} is gone") from error
        try:
            self._lock(path)
            self.header = self._expect(iteration)
            if not self.header.sealed or self.header.borrowed:
                settle_file(path)
                self.header = self._expect(iteration)
            manifest = self.slot.manifest(self.header)
            self.shard = Shard(manifest, tuple(self.slot.stored_checksums(self.header)))
        except BaseException:
            self.close()
            raise

    def _lock(self, path: Path) -> None:
        deadline = time.monotonic() + LOCK_PATIENCE
        while not self.slot.try_lock(shared=True):
            if time.monotonic() > deadline:
                raise DurableError(f"{path}: a writer holds the slot")
            time.sleep(0.02)

    def _expect(self, iteration: int) -> SlotHeader:
        header = self.slot.header()
        if not header.complete or header.iteration != iteration:
            raise DurableError(f"{self.slot.path}: the slot does not hold iteration {iteration} any more")
        return header

    def data(self, index: int, *, verify: bool = True) -> memoryview:
        """The bytes of item `index`. Raises: ReplicaCorrupt if they fail the checksum taken at capture."""
        item = self.shard.manifest.items[index]
        view = self.slot.payload(self.header)[item.offset : item.offset + item.length]
        if verify and xxhash.xxh3_64_intdigest(view) != self.shard.checksums[index]:
            raise ReplicaCorrupt(f"{self.slot.path}: tensor {item.name!r} fails its checksum")
        return view

    def check_unchanged(self) -> None:
        """Raises: DurableError if anything was written to the slot since it was opened."""
        now = self.slot.header()
        if (now.sequence, now.iteration, now.round) != (
            self.header.sequence, self.header.iteration, self.header.round
        ):  # fmt: skip
            raise DurableError(f"{self.slot.path}: the slot changed while it was being stored")

    def close(self) -> None:
        self.slot.unlock()
        with contextlib.suppress(BufferError):  # a view lives on in a traceback: unmapped when that goes
            self.slot.close()

    def __enter__(self) -> SlotReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class RankPart:
    """What one rank's slot contributes. `writes`: (entry, item index) it stores, in payload order;
    `uses`: for each item the entry that holds its bytes."""

    slot: Path
    writes: Sequence[tuple[int, int]]
    uses: Sequence[int | None]

    @classmethod
    def of(cls, assignment: Assignment, rank: int, slot: Path) -> RankPart:
        """`rank`'s part of `assignment`, stored from `slot`."""
        return cls(slot, assignment.writes_of(rank), assignment.uses[rank])


@dataclasses.dataclass
class Stored:
    """What a node has stored: facts of each file, and the place of each entry in them."""

    files: dict[str, StoredFile] = dataclasses.field(default_factory=dict)
    places: dict[int, Place] = dataclasses.field(default_factory=dict)

    def add(self, other: Stored) -> None:
        self.files.update(other.files)
        self.places.update(other.places)


def store_part(
    tier: DurableTier, iteration: int, node_rank: int, parts: Mapping[int, RankPart],
    stop: threading.Event | None = None,
) -> Stored:  # fmt: skip
    """Store the data files and rank records of a node's ranks. Takes as long as the storage does.

    Args:
        parts: global rank -> its part.
        stop: ends it early, with DurableError.

    Raises: DurableError, ReplicaCorrupt. What was stored so far is left for the root's cleaning.
    """
    from gemini_run.durable import dcp  # DCP costs a second to import: not at the start of every agent

    stored = Stored()
    for index, (rank, part) in enumerate(sorted(parts.items())):
        with SlotReader(part.slot, iteration) as reader:
            items = reader.shard.manifest.items
            if part.writes:
                name = dcp.data_file_name(node_rank, index)
                source, places = dcp.data_file(
                    name, [(entry, items[item], reader.data(item)) for entry, item in part.writes]
                )
                try:
                    stored.files[name] = _put(tier, iteration, name, source, stop)
                finally:
                    source.close()
                stored.places.update(places)
            header = reader.header
            record = RankRecord(
                rank=rank, world_size=header.world_size, iteration=iteration, round=header.round,
                manifest=reader.shard.manifest.to_json(), objects=reader.slot.objects(header),
                checksums=list(reader.shard.checksums), entries=list(part.uses),
            )  # fmt: skip
            # Before anything of this slot counts: it was the same from the first byte to the last.
            reader.check_unchanged()
            source = Source([record.to_json()])
            stored.files[layout.rank_file(rank)] = _put(tier, iteration, layout.rank_file(rank), source, stop)
    return stored


def commit(
    tier: DurableTier, iteration: int, assignment: Assignment, stored: Stored, *,
    world_size: int, run_id: str, now: float,
) -> Marker:  # fmt: skip
    """Write the two indices, then the marker: from then on the iteration exists.

    Args:
        stored: of all nodes together.
        now: unix seconds.

    Raises: DurableError; also if an entry or a rank's record is missing in `stored`.
    """
    from gemini_run.durable import dcp

    missing = [e.name for i, e in enumerate(assignment.entries) if i not in stored.places]
    missing += [f for r in range(world_size) if (f := layout.rank_file(r)) not in stored.files]
    if missing:
        raise DurableError(f"{tier.location}: iteration {iteration} is incomplete: {missing[0]!r} was not stored")
    files = dict(stored.files)
    named = [(entry.name, stored.places[i]) for i, entry in enumerate(assignment.entries)]
    for name, text in (
        (layout.INDEX, layout.index_json(iteration, named)),
        (dcp.METADATA_NAME, dcp.metadata(assignment.entries, stored.places)),
    ):
        files[name] = _put(tier, iteration, name, Source([text]), None)
    marker = Marker(iteration, world_size, now, run_id, dict(sorted(files.items())))
    tier.put_bytes(layout.folder(iteration) + layout.MARKER, marker.to_json())
    return marker


def _put(tier: DurableTier, iteration: int, name: str, source: Source, stop: threading.Event | None) -> StoredFile:
    digest = xxhash.xxh3_64()
    for offset in range(0, source.size, _DIGEST_CHUNK):
        for view in source.views(offset, _DIGEST_CHUNK):
            digest.update(view)
    tier.put_file(layout.folder(iteration) + name, source, stop)
    return StoredFile(source.size, digest.hexdigest())
