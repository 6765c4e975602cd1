"""From live tensors to bytes and back: which bytes are a tensor's, and where they go in a slot's payload."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from typing import Any

import torch
import xxhash
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gemini_run.errors import UnsupportedState
from gemini_run.plan.manifest import Item, aligned

CHUNK_BYTES = 128 * 1024  #: copied, then checked while a core's second-level cache still holds them


class StructureChanged(Exception):
    """Internal: the live state no longer has the structure of the plan; build a new one."""


@dataclasses.dataclass(slots=True)
class Source:
    """One tensor to copy: where its bytes are now and where they go.

    `dense`: the tensor covers its bytes without gaps or overlaps in some order of its dimensions, so the bytes
    can be copied as they lie; otherwise a contiguous copy is made first.
    """

    tensor: torch.Tensor  #: local, detached; keeps the storage alive
    pointer: int
    offset: int
    length: int
    dense: bool
    _bytes: tuple[int, memoryview] | None = None

    def bytes(self) -> memoryview:
        """The tensor's memory, of a dense tensor on the CPU. Valid while the tensor lives."""
        if self._bytes is None or self._bytes[0] != self.pointer:
            self._bytes = (self.pointer, bytes_at(self.pointer, self.length))
        return self._bytes[1]


def dtensor_of(tensor: torch.Tensor) -> Any | None:
    """`tensor` as a DTensor, or None. Does not import torch.distributed.tensor where nobody else did."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return None
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of `tensor`, sharing its storage."""
    dtensor = dtensor_of(tensor)
    if dtensor is None:
        return tensor.detach()
    with torch.no_grad():
        local: torch.Tensor = dtensor.to_local()
    return local.detach()


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements cover one stretch of memory, each once, whatever the order of dimensions."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return size == 0
        expected *= size
    return True


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, conjugation and negation resolved."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def unrepeated(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` with one element for each that `like`, of the same shape, has in memory along expanded dimensions."""
    for dim, (stride, size) in enumerate(zip(like.stride(), like.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in storage order, a 1-D uint8 view."""
    line = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return line.view(torch.uint8)


def check_whole(tensor: torch.Tensor, name: str) -> None:
    """Raises: UnsupportedState for tensors whose class keeps their values elsewhere, or that have none yet."""
    if is_lazy(tensor):
        raise UnsupportedState(f"{name}: has no shape yet; run one forward before the Checkpointer is made")
    if dtensor_of(tensor) is None and _wraps(tensor):
        raise UnsupportedState(
            f"{name}: a {type(tensor).__name__} keeps its values elsewhere and cannot be checkpointed bit for bit"
        )


def _wraps(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of a class with memory of its own nowhere (`_make_wrapper_subclass`)."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if is_traceable_wrapper_subclass(tensor):
        return True
    return tensor.device.type != "meta" and tensor.numel() > 0 and not tensor.data_ptr()


def check_supported(tensor: torch.Tensor, name: str) -> None:
    """Raises: UnsupportedState for tensors that are not plain memory (sparse, quantized, meta, nested)."""
    problem = None
    if tensor.layout is not torch.strided or getattr(tensor, "is_nested", False):
        problem = f"layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"quantized dtype {tensor.dtype}"
    elif tensor.device.type == "meta":
        problem = "a meta tensor (it has no values yet: materialise the model first)"
    if problem:
        raise UnsupportedState(f"{name}: {problem} cannot be checkpointed bit for bit")


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class PlanBuilder:
    """Collects the tensors of one shard; gives each its item and a leaf to stand for it in the object tree."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.sources: list[Source] = []
        self.by_name: dict[str, int] = {}
        self._seen: dict[tuple[Any, ...], int] = {}
        self._kept: list[torch.Tensor] = []  # those known by identity, so that no other takes it
        self._end = 0

    def add(self, name: str, tensor: torch.Tensor, *, share: bool = True) -> dict[str, Any]:
        """Register `tensor`; tensors over the same memory with the same layout (tied weights) share one item.

        A sharded tensor of which this rank has nothing has no memory: it is known by identity, for the same names must
        be tied on every rank (whoever reads the shards of another world looks for a chunk under one name).

        Raises:
            UnsupportedState: the tensor is no plain memory.
        """
        check_whole(tensor, name)
        dtensor = dtensor_of(tensor)
        local = local_of(tensor)
        check_supported(local, name)
        leaf: dict[str, Any] = {"$tensor": 0}
        if local.device.type != "cpu":
            leaf["device"] = local.device.type
        if dtensor is not None:
            leaf["dtensor"] = True
        key: tuple[Any, ...] = (id(tensor),)
        if local.numel():
            key = (local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.device)
        if share and key in self._seen:
            leaf["$tensor"] = self._seen[key]
            return leaf
        index = len(self.items)
        unique = name
        while unique in self.by_name:
            unique = f"{unique}#"
        dense = is_dense(local)
        shape = tuple(local.shape)
        length = local.numel() * local.element_size()
        global_shape = chunk_offsets = None
        if dtensor is not None:
            global_shape, chunk_offsets = chunk_of(dtensor)
        self.items.append(
            Item(
                name=unique,
                dtype=str(local.dtype).removeprefix("torch."),
                shape=shape,
                stride=local.stride() if dense else contiguous_stride(shape),
                offset=self._end,
                length=length,
                global_shape=global_shape,
                chunk_offsets=chunk_offsets,
            )
        )
        self.sources.append(Source(local, local.data_ptr(), self._end, length, dense))
        self._end = aligned(self._end + length)
        self.by_name[unique] = index
        if share:
            self._seen[key] = index
            if not local.numel():
                self._kept.append(tensor)
        leaf["$tensor"] = index
        return leaf


def chunk_of(dtensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the whole tensor, offsets of this rank's chunk in it).

    Raises: UnsupportedState for a DTensor of which the ranks hold summands.
    """
    if any(placement.is_partial() for placement in dtensor.placements):
        raise UnsupportedState(f"a DTensor with placements {dtensor.placements} has no value before it is reduced")
    # Private module, public name in DCP's own planner; tests/worker pins it.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return tuple(dtensor.shape), tuple(offsets)


def copy_and_digest(target: int, pointer: int, data: memoryview) -> int:
    """Copy `data`, which lies at `pointer`, to `target`, and return its xxh3_64: chunk by chunk, so that each is read
    from memory once. Both let go of the interpreter's lock. No torch operator: for any thread."""
    length = len(data)
    if length <= CHUNK_BYTES:
        ctypes.memmove(target, pointer, length)
        return xxhash.xxh3_64_intdigest(data)
    running = xxhash.xxh3_64()
    for start in range(0, length, CHUNK_BYTES):
        size = min(CHUNK_BYTES, length - start)
        ctypes.memmove(target + start, pointer + start, size)
        running.update(data[start : start + size])
    return running.intdigest()


def bytes_at(address: int, length: int) -> memoryview:
    """`length` bytes of memory at `address`, which the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    """The address of a memoryview's first byte."""
    if len(view) == 0:
        return 0
    if view.readonly:
        return int(torch.frombuffer(view, dtype=torch.uint8).data_ptr())
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
