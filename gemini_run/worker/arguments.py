"""From the keyword arguments of a Checkpointer to components."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gemini_run.errors import ConfigError
from gemini_run.worker.components import Component, Generators, Module, Stateful, Values
from gemini_run.worker.data import Position
from gemini_run.worker.data_stateful import StatefulLoader, is_torchdata
from gemini_run.worker.gradients import Gradients
from gemini_run.worker.optimizers import Optimizer
from gemini_run.worker.sampling import StatefulGenerator, generator_state, has_state

RESERVED_NAMES = ("rng", "ddp_buckets", "gradients", "iteration")  #: always included, not for the script to give


def components_of(objects: Mapping[str, Any]) -> list[Component]:
    """The components for the keyword arguments of a Checkpointer, generators last.

    Raises:
        ConfigError: an argument of a kind that cannot be checkpointed, or a reserved name; says the remedy.
    """
    components: list[Component] = []
    models: list[Module] = []  # no more than these for the optimizers: a cycle would keep a loader's workers alive

    def parameters() -> dict[str, torch.Tensor]:
        return {
            name if len(models) == 1 else f"{model.name}.{name}": tensor
            for model in models
            for name, tensor in model.tensors().items()
        }

    for name, target in objects.items():
        if name in RESERVED_NAMES:
            raise ConfigError(f"Checkpointer({name}=...): {name} is always included, leave it out")
        if target is None:
            raise ConfigError(f"Checkpointer({name}=None): leave it out, or pass the object")
        if isinstance(target, nn.Module):
            models.append(Module(name, target))
            components.append(models[-1])
        elif isinstance(target, torch.optim.Optimizer):
            components.append(Optimizer(name, target, parameters))
        elif is_torchdata(target):
            components.append(StatefulLoader(name, target))
        elif has_state(target):
            components.append(Stateful(name, target))
        elif isinstance(target, DataLoader):
            components.append(Position(name, target))
        elif generator_state(target) is not None:
            components.append(Stateful(name, StatefulGenerator(target)))
        elif type(target) in (dict, list):
            components.append(Values(name, target))
        else:
            raise ConfigError(
                f"Checkpointer({name}=...): a {type(target).__name__} has no state_dict/load_state_dict. Pass "
                "modules, optimizers, schedulers, data loaders, generators, a dict or list of values, or "
                "give the object these two methods"
            )
    components.append(Gradients(objects))
    components.append(Generators("rng"))
    return components
