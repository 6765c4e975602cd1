"""Restore into a world of another size: each rank puts its part together from the shards of the old world's ranks.

What is sharded (DTensors of FSDP2, HSDP, tensor parallelism) is known by name and by its place in the whole tensor: a
rank reads the old chunks that its own part overlaps. What is not sharded comes from one old rank, r of now being made
from r modulo the old size. Nothing is cast.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import time
from collections.abc import Sequence

import torch

from gemini_run.errors import GeminiError, ReplicaCorrupt
from gemini_run.memory.segment import refuse_durable
from gemini_run.plan.manifest import Item
from gemini_run.plan.region import Region, overlap
from gemini_run.terminal import say
from gemini_run.wire import MemoryPaths, Reshard
from gemini_run.worker.codec import Json, unpack_objects
from gemini_run.worker.components import Component, Generators
from gemini_run.worker.data import Position
from gemini_run.worker.layout import chunk_of, dtensor_of, local_of
from gemini_run.worker.loading import PayloadReader
from gemini_run.worker.restore import check_names
from gemini_run.worker.shards import Shard, Shards


@dataclasses.dataclass(frozen=True)
class Resharded:
    """What was restored. `num_bytes`: read from the old shards."""

    iteration: int
    world_size: int
    num_bytes: int
    seconds: float


def restore_resharded(components: Sequence[Component], paths: MemoryPaths, *, rank: int, round: int) -> Resharded:
    """Load what this rank of the new world starts with, from the shards that the agent named.

    A rank that has no counterpart in the old world keeps the random number generators that the script seeded.

    Raises:
        ReplicaCorrupt, PeerLost, DurableError: something cannot be read, or fails its checksum.
        GeminiError: the live objects are not those that were saved.
    """
    told = _told(paths)
    if told.round != round:
        raise ReplicaCorrupt(f"{paths.reshard}: of round {told.round}, this is round {round}")
    try:
        return _restore(components, told, rank)
    except ReplicaCorrupt:
        if told.durable is not None:
            refuse_durable(paths, told.iteration)
        raise


def _restore(components: Sequence[Component], told: Reshard, rank: int) -> Resharded:
    started = time.perf_counter()
    with Shards(told) as shards:
        base = shards[rank % told.world_size]
        saved, static, dynamic = unpack_objects(base.objects())
        if saved != told.iteration:
            raise ReplicaCorrupt(f"{base.where}: says iteration {told.iteration} and holds {saved}")
        check_names(components, static)
        reader = ShardsReader(shards, base)
        for component in components:  # generators come last: loading the others may draw from them
            if isinstance(component, Generators) and rank >= told.world_size:
                continue
            if isinstance(component, Position):
                if rank == 0:
                    say(
                        f"warning: {component.name}: its position is that of one of {told.world_size} ranks, whose "
                        "share of the data is another now: the pass begins anew"
                    )
                continue
            component.restore(static[component.name], dynamic[component.name], reader)
        for component in components:
            component.settle()
    return Resharded(told.iteration, told.world_size, reader.num_bytes, time.perf_counter() - started)


def _told(paths: MemoryPaths) -> Reshard:
    try:
        return Reshard.from_json(json.loads(paths.reshard.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReplicaCorrupt(f"{paths.reshard}: {error}") from error


class ShardsReader(PayloadReader):
    """As PayloadReader, for tensors whose part of the whole is another now. Items are those of the `base` shard."""

    def __init__(self, shards: Shards, base: Shard) -> None:
        super().__init__(base.manifest)
        self.num_bytes = 0
        self._shards = shards
        self._own = base
        self._chunks: dict[str, list[tuple[Region, Shard, int]]] | None = None

    def sharded(self, leaf: Json, like: torch.Tensor | None) -> bool:
        item = self.manifest.items[leaf["$tensor"]]
        dtensor = dtensor_of(like) if like is not None else None
        if dtensor is None or tuple(dtensor.shape) != _whole(item):
            if leaf.get("dtensor") and dtensor is not None:
                raise GeminiError(
                    f"{item.name}: of shape {list(_whole(item))}, sharded otherwise than its parameter of "
                    f"{list(dtensor.shape)}: it cannot be redistributed to another number of ranks"
                )
            return False
        return True

    def fresh(self, index: int, device: torch.device | str = "cpu", like: torch.Tensor | None = None) -> torch.Tensor:
        item = self.manifest.items[index]
        dtensor = dtensor_of(like) if like is not None else None
        if dtensor is not None and tuple(dtensor.shape) == _whole(item):
            return self._assemble(item, index, _region(dtensor)).to(device)
        if item.global_shape is None:
            return self._tensor(self._own, index).to(device)
        return self._assemble(item, index, Region.whole(item.global_shape)).to(device)

    def fits(self, index: int, live: torch.Tensor) -> bool:
        item = self.manifest.items[index]
        return str(live.dtype) == f"torch.{item.dtype}" and tuple(live.shape) == _whole(item)

    def restride(self, index: int, live: torch.Tensor) -> None:
        if self.manifest.items[index].global_shape is None:
            super().restride(index, live)

    def into(self, index: int, live: torch.Tensor, name: str) -> None:
        item = self.manifest.items[index]
        if not self.fits(index, live):
            raise self.misfit(item.dtype, _whole(item), live, name)
        target = local_of(live)
        if target.numel():
            with torch.no_grad():
                target.copy_(self._assemble(item, index, _region(live)))

    def _assemble(self, item: Item, index: int, region: Region) -> torch.Tensor:
        """The part `region` of a whole tensor. Raises: ReplicaCorrupt if the old chunks do not make it up."""
        if item.global_shape is None and region == Region.whole(item.shape):
            return self._tensor(self._own, index)
        result = torch.empty(region.shape, dtype=getattr(torch, item.dtype))
        missing = result.numel()
        for chunk, shard, at in self._chunks_of(item, index):
            common = overlap(chunk, region)
            if common is None:
                continue
            result[common.within(region)] = self._tensor(shard, at)[common.within(chunk)]
            missing -= common.numel
        if missing:
            raise ReplicaCorrupt(f"{item.name}: the shards of {self._shards.world_size} ranks do not make up the whole")
        return result

    def _chunks_of(self, item: Item, index: int) -> list[tuple[Region, Shard, int]]:
        """Each chunk of the whole tensor once, from the nearest shard that has it."""
        if item.global_shape is None:
            return [(Region.whole(item.shape), self._own, index)]
        if self._chunks is None:
            self._chunks = {}
            for shard in self._shards.all():
                for at, other in enumerate(shard.manifest.items):
                    if other.chunk_offsets is not None:
                        chunk = Region(other.chunk_offsets, other.shape)
                        known = self._chunks.setdefault(other.name, [])
                        if chunk.numel and all(chunk != region for region, _, _ in known):
                            known.append((chunk, shard, at))
        return self._chunks.get(item.name, [])

    def _tensor(self, shard: Shard, index: int) -> torch.Tensor:
        item = shard.manifest.items[index]
        tensor = torch.empty_strided(item.shape, item.stride, dtype=getattr(torch, item.dtype))
        data = shard.read(index)
        self.num_bytes += len(data)
        ctypes.memmove(tensor.data_ptr(), data, len(data))
        return tensor


def _whole(item: Item) -> tuple[int, ...]:
    return item.shape if item.global_shape is None else item.global_shape


def _region(tensor: torch.Tensor) -> Region:
    """Which part of the whole is this rank's."""
    dtensor = dtensor_of(tensor)
    if dtensor is None:
        return Region.whole(tuple(tensor.shape))
    return Region(chunk_of(dtensor)[1], tuple(local_of(dtensor).shape))
