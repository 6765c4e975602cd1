"""What runs inside the worker processes of a DataLoader: each batch brings along where their generators stand.

A worker process is seeded when it starts and then draws on (random augmentation). With each batch comes the state of
its generators after that batch, if it moved; a worker started anew in the middle of a pass begins with the state
after the last batch that training took from its predecessor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import pin_memory as _pinning
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from gemini_run.worker import sampling


@dataclasses.dataclass
class Tagged:
    """A batch, and the state of its worker's generators after it where they moved (`sampling.freeze`)."""

    batch: Any
    worker: int
    state: bytes | None

    def pin_memory(self) -> Tagged:  # called by the DataLoader's pinning thread
        batch = _pinning.pin_memory(self.batch)  # type: ignore[no-untyped-call]
        return Tagged(batch, self.worker, self.state)


class Streams:
    """The generators of one worker process."""

    def __init__(self) -> None:
        info = get_worker_info()
        if info is None:
            raise RuntimeError("not in a DataLoader worker")
        self._datasets = sampling.dataset_holders(info.dataset)
        self._last = self._now()

    def _now(self) -> tuple[dict[str, Any], list[Any]]:
        return sampling.process_state(), [holder.state() for holder in self._datasets]

    def moved(self) -> bytes | None:
        """The state, if it is not what the last call saw."""
        now = self._now()
        if _equal(now, self._last):
            return None
        self._last = now
        return sampling.freeze(now)

    def set(self, state: bytes) -> None:
        process, datasets = sampling.thaw(state)
        sampling.set_process_state(process)
        for holder, saved in zip(self._datasets, datasets, strict=False):
            holder.set_state(saved)
        self._last = self._now()


_streams: Streams | None = None  #: of this worker process; None in the training process


class Begin:
    """A `worker_init_fn`: the script's own first, then the generators are set where the predecessor's stood."""

    def __init__(self, own: Callable[[int], Any] | None, states: dict[int, bytes]) -> None:
        self._own = own
        self._states = states

    def __call__(self, worker: int) -> None:
        global _streams
        if self._own is not None:
            self._own(worker)
        _streams = Streams()
        if worker in self._states:
            _streams.set(self._states[worker])


class Collate:
    """A `collate_fn`: the script's own, its result tagged."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        self._own = own

    def __call__(self, samples: Any) -> Any:
        batch = self._own(samples)
        info = get_worker_info()
        if _streams is None or info is None:
            raise RuntimeError("not in a DataLoader worker")
        return Tagged(batch, info.id, _streams.moved())


class Loader(DataLoader[Any]):
    """A DataLoader whose first index batch goes to the worker that the uninterrupted pass would give it to.

    Attributes:
        first: number of the first index batch within its pass.
    """

    first = 0

    def check_worker_number_rationality(self) -> None:
        return  # the script's own loader has said it

    def _get_iterator(self) -> _BaseDataLoaderIter:
        return _Workers(self) if self.num_workers else super()._get_iterator()


class _Workers(_MultiProcessingDataLoaderIter):
    def __init__(self, loader: Loader) -> None:
        self._rotate = loader.first % loader.num_workers
        super().__init__(loader)

    def _try_put_index(self) -> None:
        # Private to torch; tests/contracts pins both names.
        while self._rotate:
            next(self._worker_queue_idx_cycle)
            self._rotate -= 1
        super()._try_put_index()


def loader_like(loader: DataLoader[Any], indices: Any, states: dict[int, bytes]) -> Loader:
    """A DataLoader as `loader` is now, over the same dataset, its index batches from `indices`."""
    given: dict[str, Any] = {"sampler": indices, "batch_size": None}
    if loader.batch_sampler is not None:
        given = {"batch_sampler": indices}
    collate, init = loader.collate_fn, loader.worker_init_fn
    if loader.num_workers:
        collate, init = Collate(collate), Begin(init, states)
        given |= {"prefetch_factor": loader.prefetch_factor, "in_order": getattr(loader, "in_order", True)}
    return Loader(
        loader.dataset, num_workers=loader.num_workers, collate_fn=collate, pin_memory=loader.pin_memory,
        timeout=loader.timeout, worker_init_fn=init, multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator, persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device, **given,
    )  # fmt: skip


def _equal(one: Any, other: Any) -> bool:
    """Equality of trees that may hold arrays and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)
