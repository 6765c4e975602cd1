"""DDP's gradient buckets, as state: without them a resumed run of three or more ranks is not bit-identical.

DDP lays its buckets out in the order of registration, and after the first backward anew, in the order in which
gradients became ready. The layout decides where each gradient lies in the ring all-reduce, and so in which order
the ranks' values are summed. A restarted process would run its first iteration with the first layout, the
uninterrupted run does not. So the layout is recorded, and made again before anything is restored, by a backward of
zeros in the recorded order. (With two ranks a sum has one order only; nothing is done then.)
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gemini_run.terminal import say
from gemini_run.worker.codec import Json, TensorSink
from gemini_run.worker.components import Component, unwrap
from gemini_run.worker.layout import PlanBuilder
from gemini_run.worker.loading import PayloadReader

NAME = "ddp_buckets"
_MIN_RANKS = 3  #: below, the sum of two values has one order
_ORDER_KEY = "rebuilt_per_bucket_param_indices"


class Buckets(Component):
    """The bucket layouts of every DDP wrapper around the given modules."""

    kind = "buckets"

    def __init__(self, objects: Mapping[str, Any]) -> None:
        super().__init__(NAME)
        self._objects = [o for o in objects.values() if isinstance(o, nn.Module)]
        self._found: list[DistributedDataParallel] | None = None
        self._orders: list[list[int]] | None = None

    def build(self, builder: PlanBuilder) -> Json:
        return {"kind": self.kind}

    def check(self) -> None:
        return

    def dynamic(self, sink: TensorSink) -> Json:
        if self._orders is None or not all(self._orders):
            self._orders = [_order_of(ddp) for ddp in self._wrappers()]
        return self._orders

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        wrappers = self._wrappers()
        if len(wrappers) != len(dynamic):
            return  # wrapped differently now: there is no layout to bring back
        for ddp, order in zip(wrappers, dynamic, strict=True):
            if order and not _lay_out(ddp, order):
                say(
                    "warning: DDP would not take its recorded bucket layout (static_graph?): the first iteration "
                    "after this restart may differ from an uninterrupted run in the last bits"
                )

    def _wrappers(self) -> list[DistributedDataParallel]:
        if self._found is None:
            self._found = [ddp for ddp in _wrappers_of(self._objects) if _ranks(ddp) >= _MIN_RANKS]
        return self._found


def _wrappers_of(modules: list[nn.Module]) -> list[DistributedDataParallel]:
    """The DDP wrappers among or around `modules`, in their order."""
    found: list[DistributedDataParallel] = []
    bare = []
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            found.append(module)
        else:
            bare.append(unwrap(module))
    if bare and torch.distributed.is_initialized() and torch.distributed.get_world_size() >= _MIN_RANKS:
        # The script passed the module itself: its wrapper is only to be found among all objects, once.
        everywhere = [o for o in gc.get_objects() if type(o) is DistributedDataParallel]
        for module in bare:
            found += [ddp for ddp in everywhere if unwrap(ddp) is module]
    return found


def _ranks(ddp: DistributedDataParallel) -> int:
    return torch.distributed.get_world_size(ddp.process_group)


def _order_of(ddp: DistributedDataParallel) -> list[int]:
    """Parameter indices in the order of the rebuilt buckets; empty where DDP keeps its first layout.

    At the first boundary the second layout does not exist yet: it is made now, as the next forward would.
    A collective of the wrapper's own group; every rank is at this boundary.
    """
    wrapper: Any = ddp  # what is read here has no types in some torch releases, wrong ones in others
    if wrapper.reducer._rebuild_buckets():
        wrapper.logger.set_runtime_stats_and_log()  # refreshes what is read next
    text = str(wrapper._get_ddp_logging_data().get(_ORDER_KEY, ""))
    return [int(index) for index in text.replace(",", " ").split()]


def _lay_out(ddp: DistributedDataParallel, order: list[int]) -> bool:
    """Make the bucket layout of `order` (a collective of the wrapper's group). Gradients are left as they were."""
    parameters = [p for p in ddp.module.parameters() if p.requires_grad]
    if sorted(order) != list(range(len(parameters))):
        return False
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        ddp.reducer.prepare_for_forward()
        ddp.reducer.prepare_for_backward([])
        for index in order:
            (parameters[index] * 0).sum().backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    rebuilt: bool = ddp.reducer._rebuild_buckets()
    return rebuilt
