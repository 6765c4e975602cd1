"""torch.distributed.checkpoint's file format, written straight from slots: no tensor is copied.

A ``.distcp`` file is a row of ``torch.save`` archives, one per entry; ``.metadata`` says which lies where.
Both are made by torch itself here; this module only notes where in an archive the tensor's bytes lie.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem as _filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from gemini_run.durable.layout import Place
from gemini_run.durable.tier import Source
from gemini_run.errors import UnsupportedState
from gemini_run.plan.manifest import Item
from gemini_run.plan.persist import Entry

METADATA_NAME = ".metadata"
SUFFIX = ".distcp"


def data_file_name(node_rank: int, index: int) -> str:
    return f"__{node_rank}_{index}{SUFFIX}"


def tensor_over(item: Item, data: memoryview) -> torch.Tensor:
    """The tensor that `item` describes, over `data` (its bytes), which must outlive it. Never write to it.

    Raises: UnsupportedState for a dtype that this torch does not have.
    """
    dtype = getattr(torch, item.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedState(f"tensor {item.name!r}: torch {torch.__version__} has no dtype {item.dtype}")
    if item.length == 0:
        return torch.empty(item.shape, dtype=dtype)
    # By address, because torch warns of buffers that are read-only, which a slot opened by a reader is.
    raw = (ctypes.c_ubyte * item.length).from_address(_address(data))
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    if _dense(item.shape, item.stride):
        return flat.as_strided(item.shape, item.stride)
    return flat.view(item.shape)


def data_file(name: str, parts: Iterable[tuple[int, Item, memoryview]]) -> tuple[Source, dict[int, Place]]:
    """The content of one data file, and where in it each entry lies.

    Args:
        name: the file's.
        parts: (entry index, item, its bytes), in the order in which they shall be stored. The source
            refers to the bytes: they must stay as they are until it is closed.
    """
    pieces: list[bytes | memoryview] = []
    places: dict[int, Place] = {}
    offset = 0
    for index, item, data in parts:
        archive = _Archive(data)
        torch.save(tensor_over(item, data), cast(IO[bytes], archive))
        raw_at = archive.finish()
        places[index] = Place(name, offset, archive.size, offset + raw_at, item.length)
        pieces.extend(archive.pieces)
        offset += archive.size
    return Source(pieces), places


def metadata(entries: Sequence[Entry], places: Mapping[int, Place]) -> bytes:
    """The ``.metadata`` file. `places`: by entry index, for all entries."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, Any] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for index, entry in enumerate(entries):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if entry.name not in tensors:
            tensors[entry.name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry.shape), [])
            # Lets torch's own converters give {"model": {...}, "optimizer": {...}}.
            paths[entry.name] = tuple(entry.name.split(".", 1))
        offsets, sizes = torch.Size(entry.offsets), torch.Size(entry.sizes)
        tensors[entry.name].chunks.append(ChunkStorageMetadata(offsets, sizes))
        place = places[index]
        storage[MetadataIndex(entry.name, offsets)] = _filesystem._StorageInfo(place.file, place.offset, place.length)
    content = Metadata(dict(tensors), planner_data=paths, storage_data=storage, storage_meta=StorageMeta())
    version = getattr(_filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None:
        content.version = version
    return pickle.dumps(content)


class _Archive(io.RawIOBase):
    """Receives one ``torch.save``: keeps what torch adds, refers to `data` where torch writes that."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._address = _address(data) if len(data) else 0
        self._raw_at: int | None = None
        self._added = bytearray()
        self.pieces: list[bytes | memoryview] = []
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any, /) -> int:
        length = len(chunk)
        # torch hands over the tensor's own memory in one piece; recognised by its address.
        if self._raw_at is None and length == len(self._data) and _address(chunk) == self._address:
            self._cut()
            self._raw_at = self.size
            self.pieces.append(self._data)
        else:
            self._added += chunk
        self.size += length
        return length

    def finish(self) -> int:
        """Where the tensor's bytes lie in the archive."""
        self._cut()
        if self._raw_at is not None or not len(self._data):
            return self._raw_at or 0
        raise UnsupportedState(
            f"torch {torch.__version__} writes tensors in a way that this release does not know: "
            "durable checkpoints need another version of torch or of gemini-run"
        )

    def _cut(self) -> None:
        if self._added:
            self.pieces.append(bytes(self._added))
            self._added.clear()


def _address(data: Any) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides fill memory without gaps in some order of the dimensions."""
    expected = 1
    for size, step in sorted(((s, t) for s, t in zip(shape, stride, strict=True) if s != 1), key=lambda d: d[1]):
        if step != expected:
            return False
        expected *= size
    return True
