"""Late copies: state that only an optimizer's step changes is copied beside the next forward and backward.

At the boundary only a digest of each such tensor is taken; the bytes follow on a side stream (`worker.device`) or on a
thread. Every optimizer waits for them before it steps. Scripts may change a parameter behind the optimizer's back
(weights swapped for an average's, clipping, ``.data``), so nothing is believed: the digest of what arrived must be the
one of the boundary. If it is not, the snapshot is dropped, whole, and that tensor is copied at the boundary from then
on. Version counters would be no proof: fused optimizers, ``.data`` and numpy do not move them.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini_run.memory.header import SlotHeader
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Item
from gemini_run.worker.layout import Source, address_of, bytes_at, local_of

MIN_BYTES = 64 * 1024  #: smaller tensors are copied at the boundary: less work than looking after them


@dataclasses.dataclass(frozen=True)
class LateItem:
    """A tensor whose bytes are still to come.

    Attributes:
        digest: of its bytes at the boundary; what it is a digest by is the landing's own affair.
    """

    index: int  #: in the manifest
    name: str
    source: Source
    digest: Any


class Landing(abc.ABC):
    """One snapshot whose bytes are on their way into its slot.

    Attributes:
        slot, header: the slot, torn until `finish` commits it with this header.
    """

    def __init__(self, slot: Slot, header: SlotHeader) -> None:
        self.slot = slot
        self.header = header

    @abc.abstractmethod
    def guard(self) -> None:
        """Whatever the calling thread lets happen after this comes after the copies."""

    @abc.abstractmethod
    def arrived(self) -> list[tuple[int, str]]:
        """Wait for the copies; returns (index, name) of the tensors that are not as they were at the boundary."""

    def finish(self) -> list[tuple[int, str]]:
        """As `arrived`; commits the slot if all is as it was. On the commit thread."""
        changed = self.arrived()
        if not changed:
            self.slot.commit(self.header)
        return changed


class HostLanding(Landing):
    """Copies in host memory, made by a `HostCopier`; digests are the items' checksums."""

    def __init__(self, slot: Slot, header: SlotHeader, items: Sequence[LateItem]) -> None:
        super().__init__(slot, header)
        self._items = items
        self._base = address_of(slot.view) + header.payload_offset
        self._copied = threading.Event()
        self._error: BaseException | None = None

    def guard(self) -> None:
        self._copied.wait()

    def copy(self) -> None:
        """On the copier's thread."""
        try:
            for item in self._items:
                _move(item.source, self._base)
        except Exception as error:  # noqa: BLE001 - raised again on the commit thread, which ends checkpointing by it
            self._error = error
        finally:
            self._copied.set()

    def arrived(self) -> list[tuple[int, str]]:
        self._copied.wait()
        if self._error is not None:
            raise RuntimeError(f"the copy of the state failed: {self._error}") from self._error
        return [
            (item.index, item.name)
            for item in self._items
            if xxhash.xxh3_64_intdigest(bytes_at(self._base + item.source.offset, item.source.length)) != item.digest
        ]


def _move(source: Source, base: int) -> None:
    # It lets go of the interpreter's lock: training runs on meanwhile.
    ctypes.memmove(base + source.offset, source.pointer, source.length)


class HostCopier:
    """A thread that copies, one landing after the other."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[HostLanding] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, landing: HostLanding) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="gemini-copy", daemon=True)
            self._thread.start()
        self._waiting.put(landing)

    def _main(self) -> None:
        while True:
            self._waiting.get().copy()


class Late:
    """Which tensors are copied late, and the guard before every optimizer's step.

    Args:
        mode: "auto" (state on devices only), "always", "never".
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._restless: set[str] = set()  # tensors seen to change outside of an optimizer's step
        self._landing: Landing | None = None
        self.copier = HostCopier()
        self._hook: Any = None

    def eligible(self, sources: Sequence[Source], steady: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """Indices of the sources that may be copied late: large, without gaps, changed by optimizers' steps only.

        Args:
            steady: what only optimizers' steps change.
        """
        if self._mode == "never":
            return ()
        known = {_place(local_of(tensor)) for tensor in steady}
        return tuple(
            index
            for index, source in enumerate(sources)
            if source.length >= MIN_BYTES and source.dense and _place(source.tensor) in known and self._wanted(source)
        )

    def chosen(self, eligible: Sequence[int], items: Sequence[Item]) -> list[int]:
        """Those of `eligible` that have kept still so far. `items`: of the manifest."""
        return [index for index in eligible if items[index].name not in self._restless]

    def began(self, landing: Landing) -> None:
        self._landing = landing
        if self._hook is None:
            # For the whole process: whichever optimizer steps, its parameters may be among the state.
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def changed(self, names: Iterable[str]) -> None:
        """These moved while they were copied: not again. Called on the commit thread."""
        self._restless |= set(names)

    def close(self) -> None:
        """Take the hook out again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _wanted(self, source: Source) -> bool:
        return self._mode == "always" or source.tensor.device.type == "cuda"

    def _before_step(self, *_: Any) -> None:
        if self._landing is not None:
            self._landing.guard()


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.data_ptr()
