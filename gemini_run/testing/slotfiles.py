"""Slot files made to measure, without torch and without a training job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import xxhash

from gemini_run.memory.header import SlotHeader, build_header
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Item, Manifest, aligned


def manifest_of(tensors: Mapping[str, bytes], *, owner: int = 0, world_size: int = 1) -> Manifest:
    """A manifest of flat uint8 tensors with these names and lengths."""
    items = []
    offset = 0
    for name, data in tensors.items():
        items.append(Item(name, "uint8", (len(data),), (1,), offset, len(data)))
        offset = aligned(offset + len(data))
    return Manifest(owner, world_size, world_size, tuple(items))


def write_slot(
    path: Path, *, iteration: int, tensors: Mapping[str, bytes], owner: int = 0, world_size: int = 1, round: int = 0,
    objects: bytes = b"{}", manifest: Manifest | None = None, seal: bool = True, hold: bool = False,
    lenders: Mapping[str, int] | None = None,
) -> SlotHeader:  # fmt: skip
    """Write a complete slot at `path` in the order of the commit protocol, and return its header.

    Args:
        tensors: payload by name, in the order of `manifest` (default: flat uint8 tensors).
        manifest: where the tensors are to have other types and shapes.
        seal: False leaves it complete but unsealed.
        lenders: tensors that are not written here, and in whose slot they are.
    """
    manifest = manifest or manifest_of(tensors, owner=owner, world_size=world_size)
    text = manifest.to_json()
    header = build_header(
        manifest_text=text, num_items=len(manifest.items), payload_length=manifest.payload_length, objects=objects,
        round=round, iteration=iteration, owner=owner, world_size=world_size, hold=hold,
    )  # fmt: skip
    slot = Slot(path, writable=True) if path.exists() else Slot.create(path, header.end)
    if slot.capacity < header.end:
        slot.close()
        slot = Slot.create(path, header.end)
    try:
        slot.begin()
        for item, data in zip(manifest.items, tensors.values(), strict=True):
            start = header.payload_offset + item.offset
            slot.view[start : start + item.length] = bytes(item.length) if item.name in (lenders or {}) else data
        slot.view[header.objects_offset : header.end] = objects
        slot.view[header.manifest_offset : header.manifest_offset + len(text)] = text
        if lenders:
            checksums = [xxhash.xxh3_64_intdigest(data) for data in tensors.values()]
            header = slot.write_tables(header, checksums, [lenders.get(item.name, -1) for item in manifest.items])
        slot.commit(header)
        if seal and not lenders:
            slot.seal(manifest, header)
        return slot.header()
    finally:
        slot.close()
