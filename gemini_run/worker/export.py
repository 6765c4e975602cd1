"""From the slots of all ranks to files that plain torch reads: one ``torch.save`` file, or a DCP directory."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gemini_run.durable.dcp import tensor_over
from gemini_run.durable.filesystem import FilesystemTier
from gemini_run.durable.layout import folder
from gemini_run.durable.upload import RankPart, SlotReader, commit, store_part
from gemini_run.errors import ReplicaCorrupt, UnsupportedState
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Item, Manifest
from gemini_run.plan.persist import assign
from gemini_run.worker.codec import Pickled, state_dicts


def export_torch(slots: Mapping[int, Path], target: Path) -> list[str]:
    """Write one file that ``torch.load(target)`` reads as it is, without gemini-run.

    It holds ``{"iteration": k, <component>: its state_dict, ..., "ranks": [...]}``: rank 0's components (sharded
    tensors put together), and in ``ranks`` of each rank its generators and what differs from rank 0's.

    Args:
        slots: rank -> a private, verified slot, for every rank of the world. They are mapped until this returns.

    Returns:
        Paths of values that only the training script could read (pickled objects), left out.

    Raises:
        ReplicaCorrupt: the chunks of a sharded tensor do not make up the whole.
    """
    opened = {rank: Slot(path) for rank, path in sorted(slots.items())}
    try:
        shards = {rank: _Shard(slot) for rank, slot in opened.items()}
        whole = _assemble(list(shards.values()))
        left_out: list[str] = []
        states = {}
        for rank, shard in shards.items():
            where = "" if rank == 0 else f"ranks.{rank}."
            states[rank] = {
                name: _plain(value, f"{where}{name}", left_out) for name, value in shard.state(whole).items()
            }
        first = states[min(states)]
        result = {name: value for name, value in first.items() if name != "rng"}
        result["ranks"] = [
            {name: value for name, value in state.items() if name == "rng" or not _equal(value, first.get(name))}
            for state in states.values()
        ]
        torch.save(result, target)
        return sorted(set(left_out))
    finally:
        # Tensors over the mappings may live on in an exception's frames: closing tolerates that.
        for slot in opened.values():
            slot.close()


def export_dcp(slots: Mapping[int, Path], scratch: Path, *, run_id: str, now: float) -> Path:
    """Write a checkpoint of torch.distributed.checkpoint into a folder below `scratch`, and return the folder.

    Args:
        slots: rank -> a private, sealed slot, for every rank of the world.
        now: unix seconds, for its marker.
    """
    shards = {}
    iteration = -1
    for rank, path in sorted(slots.items()):
        slot = Slot(path)
        try:
            iteration = slot.header().iteration
        finally:
            slot.close()
        with SlotReader(path, iteration) as reader:
            shards[rank] = reader.shard
    assignment = assign(shards)
    tier = FilesystemTier(str(scratch))
    parts = {rank: RankPart.of(assignment, rank, path) for rank, path in slots.items()}
    stored = store_part(tier, iteration, 0, parts)
    commit(tier, iteration, assignment, stored, world_size=len(slots), run_id=run_id, now=now)
    return scratch / folder(iteration).rstrip("/")


class _Shard:
    """One rank's slot, and its tensors over the mapping."""

    def __init__(self, slot: Slot) -> None:
        header = slot.header()
        self.manifest: Manifest = slot.manifest(header)
        self._objects = slot.objects(header)
        payload = slot.payload(header)
        self.tensors = [tensor_over(i, payload[i.offset : i.offset + i.length]) for i in self.manifest.items]

    def state(self, whole: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Its components as torch's state_dicts, sharded tensors replaced by `whole` ones."""
        items = zip(self.manifest.items, self.tensors, strict=True)
        return state_dicts(self._objects, [whole.get(i.name, t) if _sharded(i) else t for i, t in items])


def _sharded(item: Item) -> bool:
    return item.global_shape is not None and item.chunk_offsets is not None


def _assemble(shards: Sequence[_Shard]) -> dict[str, torch.Tensor]:
    """Name -> whole tensor, of every tensor of which the ranks hold chunks."""
    whole: dict[str, torch.Tensor] = {}
    places: dict[str, dict[tuple[int, ...], int]] = {}
    for shard in shards:
        for item, tensor in zip(shard.manifest.items, shard.tensors, strict=True):
            if item.global_shape is None or item.chunk_offsets is None:
                continue
            target = whole.get(item.name)
            if target is None:
                target = whole[item.name] = torch.empty(item.global_shape, dtype=tensor.dtype)
                places[item.name] = {}
            if tuple(target.shape) != item.global_shape or target.dtype != tensor.dtype:
                raise ReplicaCorrupt(f"ranks disagree about the shape of {item.name!r}")
            if item.length == 0:
                continue
            view = target
            for dimension, (offset, size) in enumerate(zip(item.chunk_offsets, item.shape, strict=True)):
                view = view.narrow(dimension, offset, size)
            view.copy_(tensor)
            places[item.name][item.chunk_offsets] = tensor.numel()
    for name, target in whole.items():
        covered = sum(places[name].values())
        if covered != math.prod(target.shape):
            raise ReplicaCorrupt(f"chunks of {name!r} cover {covered} of {target.numel()} elements")
    return whole


def _plain(value: Any, path: str, left_out: list[str]) -> Any:
    """`value` in types that ``torch.load(weights_only=True)`` knows."""
    if isinstance(value, dict):
        pairs = ((_plain(k, path, left_out), _plain(v, f"{path}.{k}", left_out)) for k, v in value.items())
        return collections.OrderedDict(pairs) if isinstance(value, collections.OrderedDict) else dict(pairs)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple):
        return tuple(_members(value, path, left_out))
    if isinstance(value, (list, collections.deque)):
        return list(_members(value, path, left_out))
    if isinstance(value, (set, frozenset)):
        return set(_members(value, path, left_out))
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value)
        except TypeError:  # strings, dates
            return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
    if isinstance(value, Pickled):
        left_out.append(path)
        return repr(value)
    if isinstance(value, torch.Tensor) and value.is_conj():
        raise UnsupportedState(f"{path}: a conjugate view")
    return value


def _members(values: Any, path: str, left_out: list[str]) -> Iterator[Any]:
    return (_plain(value, f"{path}.{index}", left_out) for index, value in enumerate(values))


def _equal(one: Any, two: Any) -> bool:
    """Whether two plain trees hold the same, to the bit."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != two.dtype or one.shape != two.shape or one.stride() != two.stride():
            return False
        return torch.equal(_bits(one), _bits(two))
    if isinstance(one, dict):
        return list(one) == list(two) and all(_equal(v, two[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two or (one != one and two != two))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaN equals NaN, and -0.0 is not 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
