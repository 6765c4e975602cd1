"""Old ranks' shards, read item by item from wherever they lie: this node's memory, a peer's, or the durable tier."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path

import xxhash

from gemini_run.durable import layout
from gemini_run.durable.checkpoint import read_record
from gemini_run.durable.layout import Place
from gemini_run.durable.tier import DurableTier, open_tier
from gemini_run.errors import GeminiError, PeerLost, ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, SlotHeader
from gemini_run.memory.slots import Slot
from gemini_run.peers.pull import RemoteSlot, Source
from gemini_run.plan.manifest import Manifest
from gemini_run.wire import Reshard, ShardPlace


class Shard(abc.ABC):
    """The state of one old rank.

    Attributes:
        owner: the rank.
        manifest: of its tensors.
        checksums: xxh3_64 of each.
        cost: cheaper ones are read first where several hold the same.
    """

    owner: int
    manifest: Manifest
    checksums: Sequence[int]
    cost: int

    @abc.abstractmethod
    def objects(self) -> bytes:
        """Everything that is not a tensor. Raises: ReplicaCorrupt, PeerLost, DurableError."""

    def read(self, index: int) -> bytes:
        """The bytes of an item, checked. Raises: ReplicaCorrupt, PeerLost, DurableError."""
        data = self._read(index)
        if xxhash.xxh3_64_intdigest(data) != self.checksums[index]:
            name = self.manifest.items[index].name
            raise ReplicaCorrupt(f"{self.where}: rank {self.owner}: tensor {name!r} fails its checksum")
        return data

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """For people."""

    @abc.abstractmethod
    def _read(self, index: int) -> bytes: ...

    def close(self) -> None:
        return


class LocalShard(Shard):
    """A slot in this node's memory, whole and sealed."""

    cost = 0

    def __init__(self, path: Path, owner: int, iteration: int, world_size: int) -> None:
        self.owner = owner
        try:
            self._slot = Slot(path)
        except FileNotFoundError as error:
            raise ReplicaCorrupt(f"{path}: the slot of rank {owner} is gone") from error
        self._header = header = self._slot.header()
        _expect(header, owner, iteration, world_size, path)
        self.manifest = self._slot.manifest(header)
        self.checksums = self._slot.stored_checksums(header)

    def objects(self) -> bytes:
        return self._slot.objects(self._header)

    @property
    def where(self) -> str:
        return str(self._slot.path)

    def _read(self, index: int) -> bytes:
        item = self.manifest.items[index]
        start = self._header.payload_offset + item.offset
        return bytes(self._slot.view[start : start + item.length])

    def close(self) -> None:
        self._slot.close()


class PeerShard(Shard):
    """A slot in a peer's memory."""

    cost = 1

    def __init__(self, source: Source, owner: int, iteration: int, world_size: int) -> None:
        self.owner = owner
        self._where = f"{source.host}:{source.port}"
        self._slot = RemoteSlot(source, owner, iteration)
        self._header = header = self._slot.header()
        _expect(header, owner, iteration, world_size, self._where)
        text = self._slot.read(HEADER_BYTES, header.manifest_length)
        self.manifest = header.checked_manifest(text, self._where)
        table = self._slot.read(header.checksums_offset, 8 * header.num_items)
        self.checksums = header.checked_table(table, self._where)
        self._slot.close()  # it connects again when it is read: a rank may look at the manifests of very many others

    def objects(self) -> bytes:
        header = self._header
        return header.checked_objects(self._slot.read(header.objects_offset, header.objects_length), self._where)

    @property
    def where(self) -> str:
        return self._where

    def _read(self, index: int) -> bytes:
        item = self.manifest.items[index]
        return self._slot.read(self._header.payload_offset + item.offset, item.length)

    def close(self) -> None:
        self._slot.close()


class DurableShard(Shard):
    """A rank of a checkpoint in the durable tier."""

    cost = 1

    def __init__(self, tier: DurableTier, places: Sequence[Place], owner: int, iteration: int) -> None:
        self.owner = owner
        self._tier = tier
        self._places = places
        self._iteration = iteration
        self._record = read_record(tier, iteration, owner)
        self.manifest = Manifest.from_json(self._record.manifest)
        self.checksums = self._record.checksums

    def objects(self) -> bytes:
        return self._record.objects

    @property
    def where(self) -> str:
        return f"{self._tier.location}, iteration {self._iteration}"

    def _read(self, index: int) -> bytes:
        item, entry = self.manifest.items[index], self._record.entries[index]
        if not item.length:
            return b""
        if entry is None or entry >= len(self._places) or self._places[entry].raw_length != item.length:
            raise ReplicaCorrupt(f"{self.where}: no bytes stored for tensor {item.name!r} of rank {self.owner}")
        place = self._places[entry]
        name = layout.folder(self._iteration) + place.file
        return self._tier.get_range(name, place.raw_offset, place.raw_length)


class Shards:
    """All shards of an old world, opened as they are asked for. A context manager."""

    def __init__(self, told: Reshard) -> None:
        """Raises: DurableError, ReplicaCorrupt."""
        self._told = told
        self.world_size = told.world_size
        self._places = {place.owner: place for place in told.places}
        self._open: dict[int, Shard] = {}
        self._tier: DurableTier | None = None
        self._index: list[Place] = []
        if told.durable is not None:
            self._tier = open_tier(told.durable)
            self._index = layout.read_index(self._tier.get_bytes(layout.folder(told.iteration) + layout.INDEX))

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *error: object) -> None:
        for shard in self._open.values():
            shard.close()

    def __getitem__(self, owner: int) -> Shard:
        """Raises: ReplicaCorrupt, PeerLost, DurableError where no copy can be read."""
        if owner not in self._open:
            self._open[owner] = self._find(owner)
        return self._open[owner]

    def all(self) -> list[Shard]:
        """The nearest first."""
        return sorted((self[owner] for owner in range(self.world_size)), key=lambda shard: (shard.cost, shard.owner))

    def _find(self, owner: int) -> Shard:
        told = self._told
        if self._tier is not None:
            return DurableShard(self._tier, self._index, owner, told.iteration)
        place = self._places[owner]
        if place.path is not None:
            return LocalShard(Path(place.path), owner, told.iteration, told.world_size)
        return self._of_peer(place)

    def _of_peer(self, place: ShardPlace) -> Shard:
        told = self._told
        problem: GeminiError | None = None
        for host, port, token in place.peers:
            source = Source(host, port, token, generation=told.round)
            try:
                return PeerShard(source, place.owner, told.iteration, told.world_size)
            except (PeerLost, ReplicaCorrupt) as error:
                problem = error
        raise ReplicaCorrupt(f"no copy of rank {place.owner} can be read: {problem or 'nobody holds one'}")


def _expect(header: SlotHeader, owner: int, iteration: int, world_size: int, where: object) -> None:
    found = (header.owner, header.iteration, header.world_size)
    if found != (owner, iteration, world_size) or not (header.complete and header.sealed) or header.borrowed:
        raise ReplicaCorrupt(
            f"{where}: rank {found[0]} of {found[2]} at iteration {found[1]} (complete {header.complete}, sealed "
            f"{bool(header.sealed)}, borrowing {bool(header.borrowed)}) in place of rank {owner} of {world_size} at "
            f"{iteration}"
        )
