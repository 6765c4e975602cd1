"""Saved tensors back into live ones: out of a slot (here), or out of other ranks' shards (`worker.reshard`)."""

from __future__ import annotations

import abc
import concurrent.futures
import ctypes
import os
from typing import Any

import torch
import xxhash

from gemini_run.errors import GeminiError, ReplicaCorrupt
from gemini_run.memory.header import SlotHeader
from gemini_run.memory.pages import populate
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Manifest
from gemini_run.worker.layout import address_of, copy_and_digest, dtensor_of, is_dense, local_of, unrepeated

_MOST_THREADS = 4
_NEW_FROM = 2**20  #: bytes; of a new tensor of less the pages come one by one


class PayloadReader(abc.ABC):
    """The tensors of a saved shard.

    Attributes:
        manifest: which there are; a leaf's `$tensor` is an index into its items.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def sharded(self, leaf: dict[str, Any], like: torch.Tensor | None) -> bool:
        """Whether the saved tensor of `leaf`, state of the parameter `like`, is to be a DTensor as that one is.

        Raises: GeminiError where it can be none.
        """
        return bool(leaf.get("dtensor"))

    @abc.abstractmethod
    def fresh(self, index: int, device: torch.device | str = "cpu", like: torch.Tensor | None = None) -> torch.Tensor:
        """A new (local) tensor with the saved dtype, shape, strides and bytes. `like`: the parameter it belongs to."""

    def later(self, index: int, device: torch.device | str = "cpu", like: torch.Tensor | None = None) -> torch.Tensor:
        """As `fresh`; the bytes may be there only once all of the state has been restored."""
        return self.fresh(index, device, like)

    def fits(self, index: int, live: torch.Tensor) -> bool:
        """Whether the saved bytes can go into this rank's part of `live` as they are (up to strides)."""
        item = self.manifest.items[index]
        return str(live.dtype) == f"torch.{item.dtype}" and tuple(local_of(live).shape) == item.shape

    def restride(self, index: int, live: torch.Tensor) -> None:
        """Lay the elements of a dense live tensor out in the order that was saved, over the same memory."""
        item = self.manifest.items[index]
        if dtensor_of(live) is None and self.fits(index, live) and live.stride() != item.stride and is_dense(live):
            live.data = live.data.as_strided(item.shape, item.stride)

    @abc.abstractmethod
    def into(self, index: int, live: torch.Tensor, name: str) -> None:
        """Overwrite this rank's part of the live tensor in place (see `later`); nothing is cast.

        Raises:
            GeminiError: dtype or shape differ from what was saved.
        """

    def misfit(self, dtype: str, shape: tuple[int, ...], live: torch.Tensor, name: str) -> GeminiError:
        """The error that says that the script made another tensor than was saved."""
        return GeminiError(
            f"{name}: the checkpoint holds {dtype} {list(shape)}, the script made "
            f"{str(live.dtype).removeprefix('torch.')} {list(live.shape)}: restore needs the model that was saved"
        )


class SlotReader(PayloadReader):
    """Tensors out of a slot. Each is checked on the way, by as many threads as this rank has cores to itself."""

    def __init__(self, slot: Slot, header: SlotHeader, manifest: Manifest) -> None:
        """
        Args:
            header: of a slot that borrows nothing. Unsealed, there is nothing to check its bytes by.

        Raises:
            ReplicaCorrupt: the table of checksums is damaged.
        """
        super().__init__(manifest)
        self._path = slot.path
        self._payload = slot.payload(header)
        self._base = address_of(self._payload)
        self._checksums = slot.stored_checksums(header) if header.sealed else None
        self._checked: set[int] = set()
        self._jobs: list[concurrent.futures.Future[None]] = []
        threads = _threads()
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "gemini-load") if threads > 1 else None

    def fresh(self, index: int, device: torch.device | str = "cpu", like: torch.Tensor | None = None) -> torch.Tensor:
        if torch.device(device).type != "cpu":
            return self._there(index).to(device)
        tensor = self._empty(index)
        self._copy(index, tensor, True)
        return tensor

    def later(self, index: int, device: torch.device | str = "cpu", like: torch.Tensor | None = None) -> torch.Tensor:
        if torch.device(device).type != "cpu":
            return self.fresh(index, device)
        tensor = self._empty(index)
        self._submit(index, tensor, new=True)
        return tensor

    def into(self, index: int, live: torch.Tensor, name: str) -> None:
        item = self.manifest.items[index]
        if not self.fits(index, live):
            raise self.misfit(item.dtype, item.shape, local_of(live), name)
        if not item.length:
            return
        live = local_of(live)
        if live.device.type == "cpu" and is_dense(live) and live.stride() == item.stride:
            self._submit(index, live, new=False)
        else:
            with torch.no_grad():
                unrepeated(live, live).copy_(unrepeated(self._there(index), live))

    def finish(self) -> None:
        """Wait for all that was put off, and check what nobody asked for.

        Raises:
            ReplicaCorrupt: a tensor fails its checksum; what it was to go into is spoilt.
        """
        try:
            for job in self._jobs:
                job.result()
            for index in range(len(self.manifest.items)):
                self._check(index)
        finally:
            self.close()

    def close(self) -> None:
        """No thread touches a tensor any more. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _submit(self, index: int, target: torch.Tensor, *, new: bool) -> None:
        if self._pool is None:
            self._copy(index, target, new)
        else:
            self._jobs.append(self._pool.submit(self._copy, index, target, new))

    def _empty(self, index: int) -> torch.Tensor:
        item = self.manifest.items[index]
        return torch.empty_strided(item.shape, item.stride, dtype=getattr(torch, item.dtype))

    def _copy(self, index: int, target: torch.Tensor, new: bool) -> None:
        """Copy and check. On any thread."""
        item = self.manifest.items[index]
        source, to = self._base + item.offset, target.data_ptr()
        if new and item.length >= _NEW_FROM:
            populate(to, item.length)
        if self._checksums is None:
            ctypes.memmove(to, source, item.length)
        else:
            data = self._payload[item.offset : item.offset + item.length]
            self._compare(index, copy_and_digest(to, source, data))

    def _there(self, index: int) -> torch.Tensor:
        """The checked tensor, in the slot's own memory: to be read from, now."""
        self._check(index)
        item = self.manifest.items[index]
        dtype = getattr(torch, item.dtype)
        if not item.length:
            return torch.empty_strided(item.shape, item.stride, dtype=dtype)
        line = torch.frombuffer(self._payload, dtype=torch.uint8, count=item.length, offset=item.offset)
        return line.view(dtype).as_strided(item.shape, item.stride)

    def _check(self, index: int) -> None:
        if index not in self._checked and self._checksums is not None:
            item = self.manifest.items[index]
            data = self._payload[item.offset : item.offset + item.length]
            self._compare(index, xxhash.xxh3_64_intdigest(data))

    def _compare(self, index: int, found: int) -> None:
        if self._checksums is not None and found != self._checksums[index]:
            raise ReplicaCorrupt(f"{self._path}: tensor {self.manifest.items[index].name!r} fails its checksum")
        self._checked.add(index)


def _threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(ranks, 1)))
