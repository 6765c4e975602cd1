"""Is everything still where the capture plan saw it? Asked at every boundary, so the loops run in C."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gemini_run.worker.layout import dtensor_of, local_of


class Lie:
    """Where tensors lie, to find out cheaply that none has been moved: `.data` may be set to anything, in place."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._plain = [t for t in tensors if dtensor_of(t) is None and not is_lazy(t)]
        self._pointers = list(map(torch.Tensor.data_ptr, self._plain))
        self._strides = list(map(torch.Tensor.stride, self._plain))
        self._trained = list(map(_requires_grad, self._plain))
        self._sharded = [t for t in tensors if dtensor_of(t) is not None]
        self._shards = self._shards_now()

    def _shards_now(self) -> list[tuple[int, bool]]:
        return [(local_of(t).data_ptr(), t.requires_grad) for t in self._sharded]

    def holds(self) -> bool:
        # One value at a time: thousands of tuples alive at once would set off the garbage collector.
        return (
            all(map(operator.eq, map(torch.Tensor.data_ptr, self._plain), self._pointers))
            and all(map(operator.eq, map(torch.Tensor.stride, self._plain), self._strides))
            and all(map(operator.is_, map(_requires_grad, self._plain), self._trained))
            and self._shards_now() == self._shards
        )


_requires_grad = operator.attrgetter("requires_grad")


def same(live: Collection[Any], before: Collection[Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(live) == len(before) and all(map(operator.is_, live, before))


def values_of(tables: list[Mapping[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(table.values() for table in tables))


def same_values(tables: list[Mapping[str, Any]], before: list[Any]) -> bool:
    """Whether the values of all tables are the very objects in `before`."""
    return same(values_of(tables), before)
