"""Kinds of training state, each as a small script.

`build(round)` gives what a Checkpointer is given, and a function that does iteration i. `bits` says all that must come
back. Of gradients it says which are there: their values show in the iterations that follow, where they matter.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from gemini_run.testing.odd import Odd

Built = tuple[dict[str, Any], Callable[[int], object]]

CASES: dict[str, Callable[[int], Built]] = {}


def case(build: Callable[[int], Built]) -> Callable[[int], Built]:
    CASES[build.__name__] = build
    return build


def bits(value: Any) -> Any:
    """`value` as nested lists of plain values that are equal only if every bit, type, shape and stride is."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.sparse_coo:
            return ["sparse", bits(value._indices()), bits(value._values()), list(value.shape)]
        plain = value.detach().resolve_conj().contiguous()
        body = plain.view(-1).view(torch.uint8).tolist() if plain.numel() else []
        return [str(value.dtype), list(value.shape), list(value.stride()), body]
    if isinstance(value, nn.Module):
        value = getattr(value, "_orig_mod", value)
        tables = [*value.named_parameters(remove_duplicate=False), *value.named_buffers(remove_duplicate=False)]
        return [
            [name, bits(tensor), tensor.requires_grad, tensor.is_leaf and tensor.grad is None]
            for name, tensor in tables
        ]
    if isinstance(value, torch.optim.Optimizer):
        groups = [bits({k: v for k, v in g.items() if k != "params"}) for g in value.param_groups]
        sizes = [len(g["params"]) for g in value.param_groups]
        parameters = [p for g in value.param_groups for p in g["params"]]
        states = [bits(dict(value.state[p])) if p in value.state else None for p in parameters]
        return [sizes, groups, states, [p.grad is None for p in parameters]]
    if isinstance(value, dict):
        return [[repr(k), bits(v)] for k, v in sorted(value.items(), key=lambda pair: repr(pair[0]))]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(bits, value)]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if isinstance(value, np.random.Generator):
        return bits(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if hasattr(value, "state_dict"):
        return bits({k: v for k, v in value.state_dict().items() if not callable(v)})
    return repr(value)


def everything(objects: dict[str, Any]) -> Any:
    generators = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
    return [bits(objects), bits(generators)]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.GELU(), nn.Linear(6, 2))


def update(optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def squared(model: nn.Module, *shape: int) -> torch.Tensor:
    return model(torch.randn(*(shape or (5, 4)))).square().mean()


# --- models -----------------------------------------------------------------------------------------------


@case
def tied(_: int) -> Built:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer}, lambda i: update(
        optimizer, lambda: model(torch.randint(6, (5,))).square().sum()
    )


@case
def gan(_: int) -> Built:
    generator, critic = mlp(), nn.Linear(2, 1)
    g, d = torch.optim.Adam(generator.parameters()), torch.optim.RMSprop(critic.parameters())

    def iterate(i: int) -> None:
        if i % 2:
            update(d, lambda: critic(generator(torch.randn(5, 4)).detach()).mean())
        update(g, lambda: -critic(generator(torch.randn(5, 4))).mean())  # leaves gradients in the critic

    return {"generator": generator, "critic": critic, "d": d, "g": g}, iterate


@case
def averaged(_: int) -> Built:
    model = mlp()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    swa = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)

    def iterate(i: int) -> None:
        update(optimizer, lambda: squared(model))
        ema.update_parameters(model)
        swa.update_parameters(model)
        scheduler.step()

    return {"model": model, "ema": ema, "swa": swa, "optimizer": optimizer, "scheduler": scheduler}, iterate


@case
def compiled_at_first(number: int) -> Built:
    model: Any = torch.compile(mlp(), backend="eager") if number % 2 == 0 else mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer}, lambda i: update(optimizer, lambda: squared(model))


@case
def compiled_later(number: int) -> Built:
    return compiled_at_first(number + 1)


@case
def unfrozen_on_the_way(_: int) -> Built:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[4].parameters(), lr=0.01)

    def iterate(i: int) -> None:
        if i == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.002, "note": "late"})
        if i == 5:
            moved = optimizer.param_groups[0]["params"].pop()
            optimizer.param_groups[1]["params"].append(moved)
        update(optimizer, lambda: squared(model))

    return {"model": model, "optimizer": optimizer}, iterate


@case
def submodule_replaced_on_the_way(_: int) -> Built:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def iterate(i: int) -> None:
        if i == 1:
            for parameter in model[4].parameters():
                optimizer.state.pop(parameter)
            model[4] = nn.Linear(6, 2)
            optimizer.param_groups[0]["params"][-2:] = list(model[4].parameters())
        update(optimizer, lambda: squared(model))

    return {"model": model, "optimizer": optimizer}, iterate


@case
def dtypes_and_strides(_: int) -> Built:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}, lambda i: update(optimizer, lambda: squared(model))


@case
def channels_last(_: int) -> Built:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    return {"model": model, "optimizer": optimizer}, lambda i: update(optimizer, lambda: squared(model, 2, 3, 5, 5))


@case
def complex_parameters(_: int) -> Built:
    model = nn.Linear(4, 4, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer}, lambda i: update(
        optimizer, lambda: model(torch.randn(5, 4, dtype=torch.complex64)).abs().sum()
    )


# --- state that changes outside of the optimizer's step ----------------------------------------------------


@case
def changed_outside_the_step(_: int) -> Built:
    embedding, model = nn.Embedding(6, 4, max_norm=0.5), mlp()
    optimizer = torch.optim.SGD([*embedding.parameters(), *model.parameters()], lr=0.3)
    shadow = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def iterate(i: int) -> None:
        update(optimizer, lambda: model(embedding(torch.randint(6, (5,)))).square().sum())
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                shadow[name].copy_(tensor if tensor.dtype == torch.int64 else 0.9 * shadow[name] + 0.1 * tensor)
            model[0].weight.clamp_(-0.2, 0.2)
        model[0].bias.data.add_(0.01)
        model[4].bias.detach().numpy()[0] += 0.25  # no version counter sees it
        model[4].weight.data = model[4].weight.data.clone()
        embedding(torch.randint(6, (3,)))  # renormalises rows in place

    return {"embedding": embedding, "model": model, "optimizer": optimizer, "shadow": shadow}, iterate


@case
def data_set_to_another_view(_: int) -> Built:
    model = nn.Linear(4, 4, bias=False)

    def iterate(i: int) -> None:
        with torch.no_grad():
            model.weight.add_(torch.randn(4, 4))
            model.weight.data = model.weight.data.t() if i % 2 else model.weight.data

    return {"model": model}, iterate


# --- gradients ----------------------------------------------------------------------------------------------


@case
def accumulation_window(_: int) -> Built:
    """A boundary at each micro-batch, zeroed at the start of a window of three."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def iterate(i: int) -> None:
        if i % 3 == 0:
            optimizer.zero_grad()
        squared(model).backward()
        if i % 3 == 2:
            optimizer.step()

    return {"model": model, "optimizer": optimizer}, iterate


@case
def accumulation_zeroed_after(_: int) -> Built:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def iterate(i: int) -> None:
        squared(model).backward()
        if i % 3 == 2:
            optimizer.step()
            model.zero_grad(set_to_none=i % 2 == 0)

    return {"model": model, "optimizer": optimizer}, iterate


@case
def never_zeroed(_: int) -> Built:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def iterate(i: int) -> None:
        squared(model).backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, iterate


@case
def zeroed_in_place(_: int) -> Built:
    """The last layer is trained once; later its gradient is zero, not None, and momentum still moves it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def iterate(i: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        (squared(model) if i == 0 else squared(model[0])).backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, iterate


@case
def sparse_gradients(_: int) -> Built:
    model = nn.Embedding(6, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)

    def iterate(i: int) -> None:
        model(torch.randint(6, (4,))).square().sum().backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()

    return {"model": model, "optimizer": optimizer}, iterate


@case
def scaler_with_skipped_steps(_: int) -> Built:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def iterate(i: int) -> None:
        optimizer.zero_grad()
        scaler.scale(squared(model) * (float("inf") if i in (0, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, iterate


# --- optimizers ---------------------------------------------------------------------------------------------


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[int], Built]:
    def build(_: int) -> Built:
        model = mlp()
        optimizer = make(model.parameters())
        return {"model": model, "optimizer": optimizer}, lambda i: update(optimizer, lambda: squared(model))

    return build


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adam_lr_tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4, line_search_fn="strong_wolfe"),
}
CASES |= {name: with_optimizer(make) for name, make in OPTIMIZERS.items()}


class Unusual(torch.optim.Optimizer):
    """fp32 state of bf16 parameters, and state of every type; tensors that are bound anew at each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "history": [], "table": {}, "best": None})

    def step(self, closure: Any = None) -> None:
        closure()
        for group in self.param_groups:
            group["history"].append(random.random())
            group["table"][len(group["table"])] = (None, torch.randn(2), {"deep": np.float32(0.5)})
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(momentum=torch.zeros(p.shape), count=0, rate=0.1, trail=[], spare=None)
                    state[7] = torch.zeros(2)
                state["count"] += 1
                state["rate"] *= 0.9
                state["trail"].append(p.grad.float().sum().reshape(1))
                state["momentum"] = 0.9 * state["momentum"] + p.grad.float()
                state["spare"] = None if state["count"] % 2 else np.arange(3)
                state[7] += 1
                state[8] = "two"
                p.data.add_(-group["lr"] * state["momentum"].bfloat16())


@case
def unusual_optimizer(_: int) -> Built:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = Unusual(model.parameters())
    return {"model": model, "optimizer": optimizer}, lambda i: update(
        optimizer, lambda: model(torch.randn(5, 4).bfloat16()).float().square().mean()
    )


# --- schedulers ---------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.7**step),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, cooldown=1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(o, 2), lr_scheduler.ConstantLR(o, 0.5, total_iters=3)]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
}


def with_scheduler(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[int], Built]:
    def build(_: int) -> Built:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)

        def iterate(i: int) -> None:
            update(optimizer, lambda: squared(model))
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if plateau else []))

        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, iterate

    return build


CASES |= {f"{name}_schedule": with_scheduler(make) for name, make in SCHEDULERS.items()}


@case
def lr_set_by_hand(_: int) -> Built:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1)

    def iterate(i: int) -> None:
        if i == 2:
            optimizer.param_groups[0]["lr"] = 0.025
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        update(optimizer, lambda: squared(model))

    return {"model": model, "optimizer": optimizer}, iterate


# --- anything else ------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"n": 0, "seen": torch.zeros(3), "turned": torch.zeros(2, 3)}

    def state_dict(self) -> dict[str, Any]:
        return copy.copy(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


@case
def objects_and_values(_: int) -> Built:
    counter = Counter()
    values: dict[Any, Any] = {"best": float("inf"), 3: [1, (2, None)], "$odd": b"\x00\xff", "text": "é\n"}
    history: list[Any] = []

    def iterate(i: int) -> None:
        counter.state["n"] += 1
        counter.state["seen"] = torch.randn(3)
        counter.state["turned"] = torch.randn(3, 2).t() if i % 2 else torch.randn(2, 3)
        values["best"] = min(values["best"], random.random())
        values[3].append({"step": i, "array": np.random.rand(2, 2), "complex": 1j * i, "bits": np.int8(i)})
        values["record"] = np.array([(i, 0.5)], dtype=[("a", "i4"), ("b", "f8")])
        history.append(torch.rand(2, dtype=torch.float64))

    return {"counter": counter, "values": values, "history": history}, iterate


@case
def generators(_: int) -> Built:
    made = {
        "torch_generator": torch.Generator().manual_seed(1),
        "numpy_generator": np.random.default_rng(2),
        "python_generator": random.Random(3),
    }
    drawn: list[float] = []

    def iterate(i: int) -> None:
        drawn.append(torch.rand(1, generator=made["torch_generator"]).item())
        drawn.append(made["numpy_generator"].random() + made["python_generator"].random())
        drawn.append(torch.rand(1).item() + np.random.rand() + random.random() + torch.randn(1).item())
        drawn.append(np.random.randn() + random.gauss(0, 1))  # both keep the second of a pair for the next call

    return {**made, "drawn": drawn}, iterate


@case
def dropout_in_functional(_: int) -> Built:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer}, lambda i: update(
        optimizer, lambda: F.dropout(model(torch.rand(5, 4)), 0.5).square().sum()
    )
