"""Gradients that outlive an iteration boundary: accumulation windows, and scripts that never zero them.

Most scripts drop the gradients that they leave at a boundary, and copying those would cost a third more. So a
gradient is left out only where its optimizer has stepped since the last boundary and the script is known to zero:
it has called the optimizer's `zero_grad()`, or was seen to have replaced what it left at a boundary before. Where
gradients were once seen to be carried on, they are kept from then on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini_run.worker.codec import Json, TensorSink
from gemini_run.worker.components import Component, fresh_tensor, unwrap
from gemini_run.worker.layout import PlanBuilder
from gemini_run.worker.loading import PayloadReader

NAME = "gradients"
_SAMPLE = 16  #: gradients looked at per boundary where the script is known to zero them; others take their turn

UNKNOWN, ZEROES, CARRIES = "unknown", "zeroes", "carries"


class _Owner:
    """An optimizer (or none) and the parameters whose gradients it uses."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer | None) -> None:
        self.name = name
        self.optimizer = optimizer
        self.parameters: list[torch.Tensor] = []
        self.habit = UNKNOWN
        self.stepped = False  #: and not zeroed since, at the last boundary
        self._stepping = False
        self._zeroing = False
        self._left: list[tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = []
        self._turn = 0

    def attach(self) -> None:
        """Hear of the optimizer's steps and of its `zero_grad()`. Nothing here makes a cycle with the optimizer."""
        optimizer, me = self.optimizer, weakref.ref(self)
        if optimizer is None:
            return
        own = optimizer.zero_grad
        function = getattr(own, "__func__", None)
        if function is None:  # a script's own, set on the instance
            function, bound = own, None
        else:
            bound = weakref.ref(optimizer)
        del own

        def stepped(*_: Any) -> None:
            if (owner := me()) is not None:
                owner._stepping = True

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if (owner := me()) is not None:
                owner._zeroing, owner._stepping = True, False
            function(*(() if bound is None else (bound(),)), *args, **kwargs)

        optimizer.register_step_post_hook(stepped)
        # On the instance, as torch's schedulers do with `step`; not part of its state, not copied with it.
        optimizer.__dict__["zero_grad"] = zero_grad

    def boundary(self, skipped: bool) -> None:
        """Learn what became of the gradients left at the boundary before, and note those left at this one."""
        kept = [left() is not None and parameter.grad is left() for parameter, left in self._left]
        if any(kept) and not self._zeroing:
            self.habit = CARRIES
        elif self.habit == UNKNOWN and (self._zeroing or (kept and not any(kept))):
            self.habit = ZEROES
        self.stepped = self._stepping or skipped
        self._stepping = self._zeroing = False
        if self.habit == CARRIES:
            self._left = []
            return
        looked_at = self.parameters
        if self.habit == ZEROES and len(looked_at) > _SAMPLE:
            self._turn = (self._turn + _SAMPLE) % len(looked_at)
            looked_at = list(itertools.islice(itertools.cycle(looked_at), self._turn, self._turn + _SAMPLE))
        self._left = [(p, weakref.ref(p.grad)) for p in looked_at if p.grad is not None]

    def dropped(self) -> bool:
        """Whether what is left now will be zeroed before it is used."""
        return self.stepped and self.habit == ZEROES


class Gradients(Component):
    """The gradients of every parameter given, through its module or its optimizer."""

    kind = "gradients"
    private = True

    def __init__(self, objects: Mapping[str, Any]) -> None:
        super().__init__(NAME)
        self._modules = [unwrap(o) for o in objects.values() if isinstance(o, nn.Module)]
        optimizers = {name: o for name, o in objects.items() if isinstance(o, torch.optim.Optimizer)}
        self._owners = [*(_Owner(name, o) for name, o in optimizers.items()), _Owner("", None)]
        self._scalers = [o for o in objects.values() if isinstance(o, torch.amp.GradScaler) and o.is_enabled()]
        self._scales: list[float] = []

    def attach(self) -> None:
        for owner in self._owners:
            owner.attach()
        self._find()
        self._scales = [scaler.get_scale() for scaler in self._scalers]

    def boundary(self) -> None:
        skipped = False
        if self._scalers:
            scales = [scaler.get_scale() for scaler in self._scalers]
            # A scaler lowers its scale where it has skipped a step for infinite gradients: they are not used again.
            skipped = any(now < before for now, before in zip(scales, self._scales, strict=False))
            self._scales = scales
        for owner in self._owners:
            owner.boundary(skipped)

    def _find(self) -> None:
        taken: set[int] = set()
        for owner in self._owners:
            if owner.optimizer is None:
                found = [p for module in self._modules for p in module.parameters()]
            else:
                found = [p for group in owner.optimizer.param_groups for p in group["params"]]
            owner.parameters = []
            for parameter in found:
                if id(parameter) not in taken:
                    taken.add(id(parameter))
                    owner.parameters.append(parameter)

    def build(self, builder: PlanBuilder) -> Json:
        self._find()
        return {"kind": self.kind}

    def check(self) -> None:
        return  # modules and optimizers check their own parameters

    def dynamic(self, sink: TensorSink) -> Json:
        owners = {}
        for owner in self._owners:
            present = [i for i, parameter in enumerate(owner.parameters) if parameter.grad is not None]
            whole = bool(present) and len(present) == len(owner.parameters)
            state: dict[str, Any] = {"habit": owner.habit, "present": "all" if whole else present}
            if not owner.dropped():
                path = f"{self.name}.{owner.name or 'others'}"
                state["values"] = [[i, _said(owner.parameters[i].grad, f"{path}.{i}", sink)] for i in present]
            owners[owner.name] = state
        return owners

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        self._find()  # optimizers have been restored, and their groups with them; scalers too
        self._scales = [scaler.get_scale() for scaler in self._scalers]
        for owner in self._owners:
            saved = dynamic.get(owner.name)
            if saved is None:
                continue
            owner.habit = saved["habit"]
            values = dict(saved.get("values", ()))
            whole = saved["present"] == "all"
            present = set(range(len(owner.parameters)) if whole else saved["present"])
            for i, parameter in enumerate(owner.parameters):
                if i not in present:
                    parameter.grad = None
                elif i in values:
                    parameter.grad = _gradient(values[i], parameter, reader)
                elif parameter.requires_grad:
                    # Present and about to be zeroed: a zero counts as a gradient, None does not.
                    parameter.grad = torch.zeros_like(parameter)


def _said(gradient: Any, path: str, sink: TensorSink) -> Json:
    if gradient.layout is not torch.sparse_coo:
        return sink(gradient, path)
    parts = [sink(gradient._indices(), f"{path}.indices"), sink(gradient._values(), f"{path}.values")]
    return {"sparse": [*parts, list(gradient.shape), gradient.is_coalesced()]}


def _gradient(tree: Json, parameter: torch.Tensor, reader: PayloadReader) -> torch.Tensor:
    if "sparse" not in tree:
        return fresh_tensor(tree, parameter, reader)
    indices, values, shape, coalesced = tree["sparse"]
    return torch.sparse_coo_tensor(
        fresh_tensor(indices, parameter, reader), fresh_tensor(values, parameter, reader), shape,
        is_coalesced=coalesced,
    )  # fmt: skip
