"""Optimizers as state: by (group, position) of their parameters, and the groups' own values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gemini_run.errors import GeminiError, UnsupportedState
from gemini_run.worker import codec
from gemini_run.worker.codec import Json, TensorSink
from gemini_run.worker.components import Component, few, fresh_tensor, unique_bytes
from gemini_run.worker.layout import PlanBuilder, StructureChanged, dtensor_of, local_of
from gemini_run.worker.loading import PayloadReader
from gemini_run.worker.unchanged import Lie, same, same_values, values_of

_ADAM_LIKE = 2  # moments of the parameter's size


class Optimizer(Component):
    """A torch optimizer: state by (group, position) of its parameters, and the groups' own values."""

    kind = "optimizer"

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, parameters: Callable[[], dict[str, torch.Tensor]]
    ) -> None:
        """
        Args:
            parameters: gives the tensors of all modules under unique names.
        """
        super().__init__(name)
        self.optimizer = optimizer
        self._parameters = parameters
        self._groups: list[list[torch.Tensor]] = []
        self._keys: list[Any] = []
        self._states: list[dict[Any, Any]] = []
        self._sizes: list[int] = []
        self._whole: list[Mapping[str, Any]] = []  #: entries that hold nothing but tensors
        self._values: list[Any] = []
        self._tensors: list[tuple[dict[Any, Any], Any, torch.Tensor]] = []
        self._others: list[tuple[int, dict[Any, Any], list[Any]]] = []
        self._lie = Lie([])

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, tensor in self._parameters().items():
            names.setdefault(id(tensor), name)
        return names

    def _positions(self) -> list[tuple[int, torch.Tensor]]:
        return list(enumerate(p for group in self.optimizer.param_groups for p in group["params"]))

    def build(self, builder: PlanBuilder) -> Json:
        names = self._names()
        known = {id(p) for _, p in self._positions()}
        surplus = [key for key in self.optimizer.state if id(key) not in known]
        if surplus:
            raise UnsupportedState(
                f"{self.name}: state under a key that is no parameter of its groups ({few(surplus)}) cannot "
                "be checkpointed"
            )
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._keys = list(self.optimizer.state.keys())
        self._states = list(self.optimizer.state.values())
        self._sizes = [len(entries) for entries in self._states]
        self._whole = []
        self._tensors = []
        self._others = []
        tensors: list[torch.Tensor] = []
        state = []
        for position, parameter in self._positions():
            entries = self.optimizer.state.get(parameter)
            if entries is None:
                continue
            label = names.get(id(parameter), str(position))
            leaves = {}
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    leaves[key] = builder.add(f"{self.name}.state.{label}.{key}", value)
            others = [key for key in entries if key not in leaves]
            if others:
                self._others.append((position, entries, others))
                self._tensors += [(entries, key, entries[key]) for key in leaves]
            else:
                self._whole.append(entries)
            tensors += [entries[key] for key in leaves]
            state.append([position, _table(leaves)])
        self._values = values_of(self._whole)
        self._lie = Lie(tensors)
        start = 0
        params = []
        for group in self.optimizer.param_groups:
            params.append(list(range(start, start + len(group["params"]))))
            start += len(group["params"])
        labels = [names.get(id(p)) for _, p in self._positions()]
        return {"kind": self.kind, "state": state, "params": params, "names": labels}

    def check(self) -> None:
        groups, state = self.optimizer.param_groups, self.optimizer.state
        if (
            len(groups) != len(self._groups)
            or not all(same(group["params"], before) for group, before in zip(groups, self._groups, strict=True))
            or not same(state.keys(), self._keys)
            or not same(state.values(), self._states)
            or list(map(len, self._states)) != self._sizes
            or not same_values(self._whole, self._values)
            or not all(entries.get(key) is value for entries, key, value in self._tensors)
            or not self._lie.holds()
        ):
            raise StructureChanged(self.name)

    def dynamic(self, sink: TensorSink) -> Json:
        moving = []
        for position, entries, keys in self._others:
            trees = {}
            for key in keys:
                if key not in entries or isinstance(entries[key], torch.Tensor):
                    raise StructureChanged(f"{self.name}.state.{position}.{key}")
                trees[key] = codec.encode(entries[key], f"{self.name}.state.{position}.{key}", sink)
            moving.append([position, _table(trees)])
        groups = [
            {
                key: codec.encode(value, f"{self.name}.param_groups.{i}.{key}", sink)
                for key, value in group.items()
                if key != "params"
            }
            for i, group in enumerate(self.optimizer.param_groups)
        ]
        return {"state": moving, "param_groups": groups}

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        self._regroup(static["params"], static["names"])
        saved: dict[int, dict[Any, Any]] = {position: _entries(leaves) for position, leaves in static["state"]}
        for position, others in dynamic["state"]:
            saved[position].update(_entries(others))
        for position, parameter in self._positions():
            if position not in saved:
                self.optimizer.state.pop(parameter, None)
                continue
            entries = self.optimizer.state[parameter]
            for key in [k for k in entries if k not in saved[position]]:
                del entries[key]
            for key, tree in saved[position].items():
                entries[key] = _into_or_new(tree, entries.get(key), parameter, reader, self.name)
        for group, values in zip(self.optimizer.param_groups, dynamic["param_groups"], strict=True):
            for key in [k for k in group if k != "params" and k not in values]:
                del group[key]
            for key, tree in values.items():
                group[key] = _into_or_new(tree, group.get(key), None, reader, self.name)

    def _regroup(self, saved: list[list[int]], labels: list[str | None]) -> None:
        """Bring the groups of parameters to what was saved: a script may have changed them on the way."""
        names = self._names()
        groups = self.optimizer.param_groups
        live = [[names.get(id(p)) for p in group["params"]] for group in groups]
        wanted = [[labels[position] for position in group] for group in saved]
        if [len(group) for group in live] == [len(group) for group in wanted] and (
            live == wanted or None in labels or any(None in group for group in live)
        ):
            return  # without names, position is all there is to go by
        by_name = self._parameters()
        unknown = [label for label in labels if label is None or label not in by_name]
        if unknown:
            raise GeminiError(
                f"{self.name}: parameter groups of sizes {[len(g) for g in wanted]} were saved, the script made "
                f"{[len(g) for g in live]}: restore needs the optimizer that was saved"
            )
        for index, group in enumerate(wanted):
            if index == len(groups):
                groups.append(dict(self.optimizer.defaults))
            groups[index]["params"] = [by_name[str(label)] for label in group]
        del groups[len(wanted) :]
        kept = {id(p) for _, p in self._positions()}
        for parameter in [p for p in self.optimizer.state if id(p) not in kept]:
            del self.optimizer.state[parameter]

    def steady(self) -> Iterable[torch.Tensor]:
        for _, parameter in self._positions():
            yield parameter
            entries = self.optimizer.state.get(parameter, {})
            yield from (value for value in entries.values() if isinstance(value, torch.Tensor))

    def expected_bytes(self) -> int:
        total = 0
        for group in self.optimizer.param_groups:
            if "betas" in group:
                factor = _ADAM_LIKE + bool(group.get("amsgrad"))
            else:
                factor = int(bool(group.get("momentum")) or "alpha" in group) + int("history_size" in group)
            for parameter in group["params"]:
                entries = self.optimizer.state.get(parameter)
                if entries:
                    total += unique_bytes(v for v in entries.values() if isinstance(v, torch.Tensor))
                else:
                    local = local_of(parameter)
                    total += factor * local.numel() * local.element_size() + 64
        return total


def _into_or_new(tree: Json, live: Any, parameter: torch.Tensor | None, reader: PayloadReader, name: str) -> Any:
    if not (isinstance(tree, dict) and "$tensor" in tree):
        return codec.decode(tree, lambda leaf: fresh_tensor(leaf, parameter, reader), allow_pickle=True)
    if isinstance(live, torch.Tensor):
        same_kind = (dtensor_of(live) is not None) == reader.sharded(tree, parameter)
        if same_kind and live.device.type == tree.get("device", "cpu") and reader.fits(tree["$tensor"], live):
            reader.restride(tree["$tensor"], live)
            reader.into(tree["$tensor"], live, name)
            return live
    return fresh_tensor(tree, parameter, reader, later=True)


def _table(entries: dict[Any, Json]) -> Json:
    """A dict of trees with keys of any plain type, as a tree."""
    if all(type(key) is str and not key.startswith("$") for key in entries):
        return entries
    return {"$dict": [[key, tree] for key, tree in entries.items()]}


def _entries(table: Json) -> dict[Any, Json]:
    return {key: tree for key, tree in table["$dict"]} if "$dict" in table else dict(table)
