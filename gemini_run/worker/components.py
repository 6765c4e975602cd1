"""The kinds of things a Checkpointer is given, and how each is captured and put back in place.

A component has a *static* part (which tensors there are, under which names: fixed while the structure is) and
a *dynamic* part (everything else, said anew at each snapshot).
"""

from __future__ import annotations

import abc
import itertools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gemini_run.errors import GeminiError, UnsupportedState
from gemini_run.worker import codec, rng
from gemini_run.worker.codec import Json, TensorSink
from gemini_run.worker.layout import PayloadReader, PlanBuilder, StructureChanged, dtensor_of, local_of

_ADAM_LIKE = 2  # moments of the parameter's size


class Component(abc.ABC):
    """One named piece of training state."""

    kind: str

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def build(self, builder: PlanBuilder) -> Json:
        """Register the tensors that stay where they are; return the static part."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises: StructureChanged if what `build` saw is no longer what is there."""

    @abc.abstractmethod
    def dynamic(self, sink: TensorSink) -> Json:
        """The rest of the state, as it is now. May raise StructureChanged through `sink`."""

    @abc.abstractmethod
    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        """Put the saved state back into the live objects, in place."""

    def attach(self) -> None:
        """Called once, inside gemini-run, before anything else."""
        return

    def boundary(self) -> None:
        """Called once at each iteration boundary, before the snapshot if there is one."""
        return

    def settle(self) -> None:
        """Called once every component has been restored."""
        return

    def expected_bytes(self) -> int:
        """Bytes of tensors this will have once the first step has made its state (an estimate)."""
        return 0


class Generators(Component):
    """The process's random number generators."""

    kind = "rng"

    def build(self, builder: PlanBuilder) -> Json:
        return {"kind": self.kind}

    def check(self) -> None:
        return

    def dynamic(self, sink: TensorSink) -> Json:
        return codec.encode(rng.capture(), self.name, sink)

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        rng.restore(codec.decode(dynamic, lambda leaf: reader.fresh(leaf["$tensor"])))


class Module(Component):
    """An nn.Module: parameters, buffers (persistent and not), extra state; names free of wrappers."""

    kind = "module"

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name)
        self.module = unwrap(module)
        self._modules: list[Mapping[str, Any]] = []
        self._tables: list[Mapping[str, Any]] = []
        self._children: list[Any] = []
        self._entries: list[Any] = []
        self._lie = Lie([])
        self._extra: list[tuple[str, nn.Module]] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        """Clean name -> parameter or buffer, tied ones under each of their names."""
        return {name: tensor for name, _, _, tensor in self._walk()}

    def _walk(self) -> list[tuple[str, Mapping[str, Any], str, torch.Tensor]]:
        found = []
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        found.append((clean_name(f"{prefix}.{key}" if prefix else key), table, key, tensor))
        return found

    def _extras(self) -> list[tuple[str, nn.Module]]:
        return [
            (clean_name(f"{prefix}._extra_state" if prefix else "_extra_state"), module)
            for prefix, module in self.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def build(self, builder: PlanBuilder) -> Json:
        names = {name: builder.add(f"{self.name}.{name}", tensor) for name, _, _, tensor in self._walk()}
        modules = list(self.module.modules())
        self._modules = [module._modules for module in modules]
        self._tables = [table for module in modules for table in (module._parameters, module._buffers)]
        self._children = _values_of(self._modules)
        self._entries = _values_of(self._tables)
        self._lie = Lie([tensor for tensor in self._entries if tensor is not None])
        self._extra = self._extras()
        frozen = [n for n, t in self.tensors().items() if isinstance(t, nn.Parameter) and not t.requires_grad]
        return {"kind": self.kind, "tensors": names, "frozen": frozen}

    def check(self) -> None:
        same = _same_values(self._modules, self._children) and _same_values(self._tables, self._entries)
        if not (same and self._lie.holds()):
            raise StructureChanged(self.name)

    def dynamic(self, sink: TensorSink) -> Json:
        return {
            name: codec.encode(module.get_extra_state(), f"{self.name}.{name}", sink) for name, module in self._extra
        }

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        live = self.tensors()
        saved = static["tensors"]
        if live.keys() != saved.keys():
            missing, surplus = sorted(saved.keys() - live.keys()), sorted(live.keys() - saved.keys())
            raise GeminiError(
                f"{self.name}: the model is not the one that was saved "
                f"(missing here: {_few(missing)}; not in the checkpoint: {_few(surplus)})"
            )
        for name, leaf in saved.items():
            reader.restride(leaf["$tensor"], live[name])
            reader.into(leaf["$tensor"], local_of(live[name]), f"{self.name}.{name}")
        frozen = set(static["frozen"])
        for name, tensor in live.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad is (name in frozen):
                tensor.requires_grad_(name not in frozen)
        extras = dict(self._extras())
        for name, tree in dynamic.items():
            value = codec.decode(tree, lambda leaf: reader.fresh(leaf["$tensor"]), allow_pickle=True)
            extras[name].set_extra_state(value)

    def expected_bytes(self) -> int:
        return _unique_bytes(self.tensors().values())


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
                f"{self.name}: state under a key that is no parameter of its groups ({_few(surplus)}) cannot "
                "be checkpointed"
            )
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._keys = list(self.optimizer.state.keys())
        self._states = list(self.optimizer.state.values())
        self._sizes = [len(entries) for entries in self._states]
        self._tensors = []
        self._others = []
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
                    self._tensors.append((entries, key, value))
            others = [key for key in entries if key not in leaves]
            if others:
                self._others.append((position, entries, others))
            state.append([position, _table(leaves)])
        self._lie = Lie([value for _, _, value in self._tensors])
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
            or not all(_same(group["params"], before) for group, before in zip(groups, self._groups, strict=True))
            or not _same(state.keys(), self._keys)
            or not _same(state.values(), self._states)
            or list(map(len, self._states)) != self._sizes
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
                    total += _unique_bytes(v for v in entries.values() if isinstance(v, torch.Tensor))
                else:
                    local = local_of(parameter)
                    total += factor * local.numel() * local.element_size() + 64
        return total


class Stateful(Component):
    """Anything with state_dict() and load_state_dict(): schedulers, scalers, stateful data loaders, EMA."""

    kind = "stateful"

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name)
        self.target = target

    def build(self, builder: PlanBuilder) -> Json:
        return {"kind": self.kind}

    def check(self) -> None:
        return

    def dynamic(self, sink: TensorSink) -> Json:
        return codec.encode(self.target.state_dict(), self.name, sink)

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        state = codec.decode(dynamic, lambda leaf: fresh_tensor(leaf, None, reader), allow_pickle=True)
        self.target.load_state_dict(state)


class Values(Component):
    """A dict or list of plain values, updated in place."""

    kind = "values"

    def __init__(self, name: str, target: dict[Any, Any] | list[Any]) -> None:
        super().__init__(name)
        self.target = target

    def build(self, builder: PlanBuilder) -> Json:
        return {"kind": self.kind}

    def check(self) -> None:
        return

    def dynamic(self, sink: TensorSink) -> Json:
        return codec.encode(self.target, self.name, sink)

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        saved = codec.decode(dynamic, lambda leaf: fresh_tensor(leaf, None, reader), allow_pickle=True)
        self.target.clear()
        if isinstance(self.target, dict):
            self.target.update(saved)
        else:
            self.target.extend(saved)


class Lie:
    """Where tensors lie, to find out cheaply that none has been moved: `.data` may be set to anything, in place."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._plain = [t for t in tensors if dtensor_of(t) is None and not is_lazy(t)]
        self._sharded = [t for t in tensors if dtensor_of(t) is not None]
        self._were = self._are()

    def _are(self) -> tuple[list[Any], ...]:
        return (
            list(map(torch.Tensor.data_ptr, self._plain)),
            list(map(torch.Tensor.stride, self._plain)),
            list(map(_requires_grad, self._plain)),
            [(local_of(t).data_ptr(), t.requires_grad) for t in self._sharded],
        )

    def holds(self) -> bool:
        return self._are() == self._were


_requires_grad = operator.attrgetter("requires_grad")


def _same(live: Collection[Any], before: Collection[Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    return len(live) == len(before) and all(map(operator.is_, live, before))


def _values_of(tables: list[Mapping[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(table.values() for table in tables))


def _same_values(tables: list[Mapping[str, Any]], before: list[Any]) -> bool:
    return _same(_values_of(tables), before)


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel wrappers and torch.compile."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
            inner = module.module if isinstance(module, wrappers) else None
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def clean_name(name: str) -> str:
    """`name` without the segments that torch.compile and FSDP1 put in."""
    return ".".join(p for p in name.split(".") if p not in ("_orig_mod", "_fsdp_wrapped_module"))


def _into_or_new(tree: Json, live: Any, parameter: torch.Tensor | None, reader: PayloadReader, name: str) -> Any:
    if not (isinstance(tree, dict) and "$tensor" in tree):
        return codec.decode(tree, lambda leaf: fresh_tensor(leaf, parameter, reader), allow_pickle=True)
    if isinstance(live, torch.Tensor):
        target = local_of(live)
        same_kind = (dtensor_of(live) is not None) == bool(tree.get("dtensor"))
        if same_kind and target.device.type == tree.get("device", "cpu") and reader.fits(tree["$tensor"], target):
            reader.restride(tree["$tensor"], live)
            reader.into(tree["$tensor"], target, name)
            return live
    return fresh_tensor(tree, parameter, reader)


def fresh_tensor(leaf: dict[str, Any], parameter: torch.Tensor | None, reader: PayloadReader) -> torch.Tensor:
    """A new tensor for a leaf, on the device of `parameter` and sharded as it is, where the saved one was."""
    device: torch.device | str = leaf.get("device", "cpu")
    if device != "cpu" and parameter is not None:
        device = local_of(parameter).device
    tensor = reader.fresh(leaf["$tensor"], device)
    if not leaf.get("dtensor"):
        return tensor
    dtensor = dtensor_of(parameter) if parameter is not None else None
    if dtensor is None:
        raise GeminiError("the checkpoint holds a sharded tensor where the script has none")
    from torch.distributed.tensor import DTensor

    if tuple(local_of(dtensor).shape) == tuple(tensor.shape):
        return DTensor.from_local(
            tensor, dtensor.device_mesh, dtensor.placements, run_check=False,
            shape=dtensor.shape, stride=dtensor.stride(),
        )  # fmt: skip
    return DTensor.from_local(tensor, dtensor.device_mesh, run_check=False)


def _table(entries: dict[Any, Json]) -> Json:
    """A dict of trees with keys of any plain type, as a tree."""
    if all(type(key) is str and not key.startswith("$") for key in entries):
        return entries
    return {"$dict": [[key, tree] for key, tree in entries.items()]}


def _entries(table: Json) -> dict[Any, Json]:
    return {key: tree for key, tree in table["$dict"]} if "$dict" in table else dict(table)


def _unique_bytes(tensors: Any) -> int:
    sizes = {}
    for tensor in tensors:
        local = local_of(tensor)
        sizes[(local.data_ptr(), tuple(local.shape))] = local.numel() * local.element_size()
    return sum(sizes.values())


def _few(names: list[Any]) -> str:
    shown = ", ".join(str(n) for n in names[:3])
    return (shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")) or "none"
