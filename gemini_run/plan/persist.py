"""Who stores which tensor of one iteration in the durable tier, decided from manifests and checksums alone.

Tensors whose bytes agree on several ranks are stored once, and the work is spread over the ranks that hold
them. Nothing is taken for equal because its name is: where ranks differ, each variant is stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from gemini_run.plan.manifest import Item, Manifest


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one rank has: its manifest, and one checksum (xxh3_64) per item of it."""

    manifest: Manifest
    checksums: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One block of bytes that is stored once.

    Attributes:
        name: of the tensor, as readers of the checkpoint see it.
        writer: global rank that stores it.
        item: index in the writer's manifest.
        dtype: torch's name without the prefix.
        shape: of the whole tensor.
        offsets: where this chunk lies in it.
        sizes: shape of this chunk (equal to `shape` where the tensor is whole).
    """

    name: str
    writer: int
    item: int
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Attributes:
    entries: all that is stored.
    uses: rank -> for each item of its manifest the entry that holds its bytes, None where it has none
        (an empty chunk of a tensor that others hold).
    """

    entries: tuple[Entry, ...]
    uses: Mapping[int, tuple[int | None, ...]]

    def written_by(self, rank: int) -> list[int]:
        """Indices of the entries that `rank` stores, in the order of its payload."""
        mine = [i for i, entry in enumerate(self.entries) if entry.writer == rank]
        return sorted(mine, key=lambda i: self.entries[i].item)

    def writes_of(self, rank: int) -> list[tuple[int, int]]:
        """(entry, index in the rank's manifest) of all that `rank` stores, in the order of its payload."""
        return [(index, self.entries[index].item) for index in self.written_by(rank)]


@dataclasses.dataclass
class _Variant:
    """Equal bytes under one name on one or more ranks. `holders`: (rank, item index), lowest rank first."""

    item: Item
    name: str
    whole: bool  # stored as a tensor of its own, not as a chunk of the named one
    holders: list[tuple[int, int]]


def assign(shards: Mapping[int, Shard]) -> Assignment:
    """Decide for all ranks at once; equal inputs give equal results on every node.

    Args:
        shards: global rank -> what it has.
    """
    variants = _name(_group(shards))
    writers = _balance(variants)
    entries = []
    uses: dict[int, list[int | None]] = {r: [None] * len(shards[r].manifest.items) for r in sorted(shards)}
    for index, (variant, (writer, position)) in enumerate(zip(variants, writers, strict=True)):
        item = variant.item
        chunked = item.global_shape is not None and item.chunk_offsets is not None and not variant.whole
        shape = item.global_shape if chunked and item.global_shape is not None else item.shape
        offsets = item.chunk_offsets if chunked and item.chunk_offsets is not None else (0,) * len(item.shape)
        entries.append(Entry(variant.name, writer, position, item.dtype, shape, offsets, item.shape))
        for rank, place in variant.holders:
            uses[rank][place] = index
    return Assignment(tuple(entries), {rank: tuple(use) for rank, use in uses.items()})


def _group(shards: Mapping[int, Shard]) -> list[_Variant]:
    """Items with equal bytes *and* equal meaning, in the order in which the lowest rank has them."""
    found: dict[tuple[object, ...], _Variant] = {}
    for rank in sorted(shards):
        shard = shards[rank]
        for position, (item, checksum) in enumerate(zip(shard.manifest.items, shard.checksums, strict=True)):
            if item.length == 0 and item.global_shape is not None and math.prod(item.global_shape) > 0:
                continue  # an empty chunk: the manifest alone says all
            # The bytes are in storage order, so tensors are equal only if their strides are, too.
            key = (item.name, item.dtype, item.shape, item.stride, item.global_shape, item.chunk_offsets,
                   item.length, checksum)  # fmt: skip
            variant = found.setdefault(key, _Variant(item, item.name, False, []))
            variant.holders.append((rank, position))
    return list(found.values())


def _name(variants: list[_Variant]) -> list[_Variant]:
    """Give the plain name to the lowest rank's variant of each place, and names of their own to others."""
    plain = {variant.item.name for variant in variants}
    taken = set(plain)
    kinds: dict[str, tuple[object, ...]] = {}
    places: set[tuple[str, tuple[int, ...] | None]] = set()
    for variant in variants:
        item = variant.item
        kind = (item.dtype, item.global_shape, item.shape if item.global_shape is None else None)
        place = (item.name, item.chunk_offsets)
        if kinds.setdefault(item.name, kind) == kind and place not in places:
            places.add(place)
            continue
        name = f"{item.name}@rank{variant.holders[0][0]}"
        while name in taken:  # a tensor of the user's own may be called so, or a rank has two chunks
            name += "@"
        taken.add(name)
        variant.name, variant.whole = name, True
    return variants


def _balance(variants: list[_Variant]) -> list[tuple[int, int]]:
    """The writer of each variant: largest first, to the holder with the fewest bytes so far."""
    load: dict[int, int] = {}
    writers: list[tuple[int, int]] = [variant.holders[0] for variant in variants]
    for variant in variants:
        if len(variant.holders) == 1:
            rank = variant.holders[0][0]
            load[rank] = load.get(rank, 0) + variant.item.length
    shared = [i for i, variant in enumerate(variants) if len(variant.holders) > 1]
    for index in sorted(shared, key=lambda i: (-variants[i].item.length, i)):
        holder = min(variants[index].holders, key=lambda h: (load.get(h[0], 0), h[0]))
        load[holder[0]] = load.get(holder[0], 0) + variants[index].item.length
        writers[index] = holder
    return writers
