"""Slots with real tensors in them, as the worker's capture leaves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from gemini_run.durable.upload import RankPart, SlotReader, Stored, commit, store_part
from gemini_run.memory.header import build_header
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Item, Manifest, aligned
from gemini_run.plan.persist import Assignment, assign

Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # (global shape, offsets)


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's memory, in storage order (all tensors here are dense)."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def make_slot(
    path: Path, tensors: Mapping[str, torch.Tensor], *, owner: int = 0, world_size: int = 1, iteration: int = 7,
    round: int = 1, hold: bool = False, seal: bool = True, objects: object = None,
    chunks: Mapping[str, Chunk] | None = None,
) -> bytes:  # fmt: skip
    """Write a complete slot; returns all its bytes that mean something, from the manifest on."""
    items, offset = [], 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        shape, places = (chunks or {}).get(name, (None, None))
        dtype = str(tensor.dtype).removeprefix("torch.")
        items.append(Item(name, dtype, tuple(tensor.shape), tensor.stride(), offset, length, shape, places))
        offset = aligned(offset + length)
    manifest = Manifest(owner, world_size, 1, tuple(items))
    text, objects_text = manifest.to_json(), json.dumps({"objects": objects}).encode()
    header = build_header(
        manifest_text=text, num_items=len(items), payload_length=manifest.payload_length, objects=objects_text,
        round=round, iteration=iteration, owner=owner, world_size=world_size, hold=hold, now=1.0,
    )  # fmt: skip
    slot = Slot.create(path, header.end)
    slot.begin()
    slot.view[header.manifest_offset : header.manifest_offset + len(text)] = text
    slot.view[header.objects_offset : header.end] = objects_text
    for item, tensor in zip(items, tensors.values(), strict=True):
        at = header.payload_offset + item.offset
        slot.view[at : at + item.length] = raw(tensor)
    slot.commit(header)
    if seal:
        slot.seal(manifest, header)
    content = bytes(slot.view[header.manifest_offset : header.end])
    slot.close()
    return content


def assign_slots(paths: Mapping[int, Path], iteration: int = 7) -> Assignment:
    shards = {}
    for rank, path in paths.items():
        with SlotReader(path, iteration) as reader:
            shards[rank] = reader.shard
    return assign(shards)


def parts_of(assignment: Assignment, paths: Mapping[int, Path]) -> dict[int, RankPart]:
    return {rank: RankPart.of(assignment, rank, path) for rank, path in paths.items()}


def persist(tier, paths: Mapping[int, Path], iteration: int = 7):
    """All of a checkpoint, every rank as a node of its own. Returns: the marker."""
    assignment = assign_slots(paths, iteration)
    stored = Stored()
    for rank, part in parts_of(assignment, paths).items():
        stored.add(store_part(tier, iteration, rank, {rank: part}))
    return commit(tier, iteration, assignment, stored, world_size=len(paths), run_id="r", now=1.0)


def random_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))
