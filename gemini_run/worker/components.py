"""The kinds of things a Checkpointer is given, and how each is captured and put back in place.

A component has a *static* part (which tensors there are, under which names: fixed while the structure is) and
a *dynamic* part (everything else, said anew at each snapshot).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gemini_run.errors import GeminiError
from gemini_run.worker import codec, rng
from gemini_run.worker.codec import Json, TensorSink
from gemini_run.worker.layout import PlanBuilder, StructureChanged, dtensor_of, local_of
from gemini_run.worker.loading import PayloadReader
from gemini_run.worker.unchanged import Lie, same_values, values_of


class Component(abc.ABC):
    """One named piece of training state."""

    kind: str
    private = False  #: each rank's own: where ranks hold it alike this is chance, and no reason to share the copying

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

    def steady(self) -> Iterable[torch.Tensor]:
        """Tensors that, as a rule, nothing but an optimizer's step changes (`worker.late`)."""
        return ()


class Generators(Component):
    """The process's random number generators."""

    kind = "rng"
    private = True

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
        self._children = values_of(self._modules)
        self._entries = values_of(self._tables)
        self._lie = Lie([tensor for tensor in self._entries if tensor is not None])
        self._extra = self._extras()
        frozen = [n for n, t in self.tensors().items() if isinstance(t, nn.Parameter) and not t.requires_grad]
        return {"kind": self.kind, "tensors": names, "frozen": frozen}

    def check(self) -> None:
        same = same_values(self._modules, self._children) and same_values(self._tables, self._entries)
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
                f"(missing here: {few(missing)}; not in the checkpoint: {few(surplus)})"
            )
        for name, leaf in saved.items():
            reader.restride(leaf["$tensor"], live[name])
            reader.into(leaf["$tensor"], live[name], f"{self.name}.{name}")
        frozen = set(static["frozen"])
        for name, tensor in live.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad is (name in frozen):
                tensor.requires_grad_(name not in frozen)
        extras = dict(self._extras())
        for name, tree in dynamic.items():
            value = codec.decode(tree, lambda leaf: reader.fresh(leaf["$tensor"]), allow_pickle=True)
            extras[name].set_extra_state(value)

    def expected_bytes(self) -> int:
        return unique_bytes(self.tensors().values())


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


def fresh_tensor(
    leaf: dict[str, Any], parameter: torch.Tensor | None, reader: PayloadReader, *, later: bool = False
) -> torch.Tensor:
    """A new tensor for a leaf, on the device of `parameter` and sharded as it is, where the saved one was. `later`: its
    bytes may come once all of the state has been restored."""
    device: torch.device | str = leaf.get("device", "cpu")
    if device != "cpu" and parameter is not None:
        device = local_of(parameter).device
    tensor = (reader.later if later else reader.fresh)(leaf["$tensor"], device, parameter)
    if not reader.sharded(leaf, parameter):
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


def unique_bytes(tensors: Any) -> int:
    sizes = {}
    for tensor in tensors:
        local = local_of(tensor)
        sizes[(local.data_ptr(), tuple(local.shape))] = local.numel() * local.element_size()
    return sum(sizes.values())


def few(names: list[Any]) -> str:
    shown = ", ".join(str(n) for n in names[:3])
    return (shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")) or "none"
