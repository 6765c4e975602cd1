"""Killed anywhere and restored in a fresh process, bit for bit, for every kind of training state.

Of `contents`: case A34 (scaler_with_skipped_steps), A35 (accumulation_window, accumulation_zeroed_after, never_zeroed;
with DDP test_buckets.py), A39 (the schedules, lr_set_by_hand), A41 (lbfgs, gan, unusual_optimizer), A46 and A47
(dtypes_and_strides, channels_last).
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from contents import CASES, Built, everything
from dying import a_while_after, in_a_fork, kill_self, newest_iteration, until_the_end
from torch.nn.parallel import DistributedDataParallel

import gemini_run
from gemini_run.errors import UnsupportedState
from gemini_run.wire import MemoryPaths
from gemini_run.worker import capture, late

TOTAL = 7
KILLS = [(2, "in the snapshot"), (3, "in the step"), (5, "between")]  #: (iterations finished, where)


@pytest.fixture(scope="module", autouse=True)
def _imports_of_the_compiler() -> None:
    """Once here, and not in each forked process."""
    torch.compile(torch.nn.Identity(), backend="eager")(torch.zeros(1))


def die_in_the_snapshot() -> None:
    """Let the next copy end this process when half of it is done."""
    copy = capture._copy_and_check

    def dying(sources: Any, base: int, lenders: Any) -> Any:
        half = len(sources) // 2
        copy(sources[:half], base, lenders[:half])
        kill_self()

    capture._copy_and_check = dying


def die_in_the_step(objects: dict[str, Any]) -> None:
    """Die when the first optimizer has stepped."""
    for target in objects.values():
        if isinstance(target, torch.optim.Optimizer):
            target.register_step_post_hook(lambda *_: kill_self())
            return


def copy_slowly() -> None:
    """Every copy, at the boundary and beside training, takes a while."""
    copy, move = capture._copy_and_check, late._move

    def slow(sources: Any, base: int, lenders: Any) -> list[int]:
        checksums = []
        for source, lender in zip(sources, lenders, strict=True):
            checksums += copy([source], base, [lender])
            time.sleep(0.0005)
        return checksums

    def slow_move(*args: Any) -> None:
        time.sleep(0.0005)
        move(*args)

    capture._copy_and_check, late._move = slow, slow_move


def train(build: Callable[[int], Built], number: int, out: Path, kill: tuple[int, str] | None) -> None:
    """Rounds `number` of a run: a line (iteration, digest of everything) after each iteration."""
    torch.manual_seed(1 + number)
    np.random.seed(number)
    random.seed(number)
    objects, iterate = build(number)
    ckpt = gemini_run.Checkpointer(**objects)
    ckpt.restore()
    with out.open("a") as log:
        if ckpt.iteration:
            print(json.dumps([ckpt.iteration, digest(objects)]), file=log, flush=True)
        while ckpt.iteration < TOTAL:
            if kill == (ckpt.iteration, "in the step"):
                die_in_the_step(objects)
            iterate(ckpt.iteration)
            if kill == (ckpt.iteration, "in the step"):  # where no optimizer has stepped
                kill_self()
            if kill == (ckpt.iteration, "in the snapshot"):
                die_in_the_snapshot()
            print(json.dumps([ckpt.iteration + 1, digest(objects)]), file=log, flush=True)
            ckpt.step()
            if kill == (ckpt.iteration, "between"):
                kill_self()
    ckpt.close()


def digest(objects: dict[str, Any]) -> list[str]:
    """One for each object, so that a failure says which; the generators last."""
    found, generators = everything(objects)
    return [
        f"{name} {xxhash.xxh3_64_hexdigest(json.dumps(state).encode())}"
        for name, state in [*found, ("rng", generators)]
    ]


def states(path: Path) -> dict[int, Any]:
    """Iteration -> state; what was done or restored again must be the same."""
    seen: dict[int, Any] = {}
    for line in path.read_text().splitlines():
        iteration, state = json.loads(line)
        assert seen.setdefault(iteration, state) == state, f"iteration {iteration}"
    return seen


@pytest.mark.parametrize("name", CASES)
def test_killed_anywhere(
    name: str, as_worker: Any, memory: MemoryPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, got = tmp_path / "want", tmp_path / "got"
    build = CASES[name]
    until_the_end(as_worker, memory, lambda number: train(build, number, got, [*KILLS, None][number]), len(KILLS))
    monkeypatch.delenv("GEMINI_WORKER")
    assert in_a_fork(lambda: train(build, 0, want, None)) == 0
    assert states(got) == states(want)
    assert sorted(states(want)) == list(range(1, TOTAL + 1))


@pytest.mark.parametrize("name", CASES)
def test_killed_at_random(
    name: str, as_worker: Any, memory: MemoryPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment of a slow copy or a step; every other round copies late."""
    want, got = tmp_path / "want", tmp_path / "got"
    build = CASES[name]
    draw = random.Random(name)

    def run(number: int) -> None:
        copy_slowly()
        train(build, number, got, None)

    for number in range(4):
        found = newest_iteration(memory)
        as_worker(
            round=number, late_copy="always" if number % 2 else "never", restore_iteration=found,
            restore_source="none" if found is None else "local",
        )  # fmt: skip
        kill = a_while_after(got, 2, draw.uniform(0, 0.06)) if number < 3 else None
        if in_a_fork(functools.partial(run, number), kill) == 0:
            break  # sooner at its end than it was killed
    monkeypatch.delenv("GEMINI_WORKER")
    assert in_a_fork(lambda: train(build, 0, want, None)) == 0
    assert states(got) == states(want)
    assert sorted(states(want)) == list(range(1, TOTAL + 1))


def sparse() -> Any:
    return torch.eye(3).to_sparse()


def quantized() -> Any:
    return torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8)


def meta() -> Any:
    return torch.empty(3, device="meta")


def nested() -> Any:
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged)


class Wrapper(torch.Tensor):
    """A tensor whose values are in another one."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return NotImplemented


def wrapped() -> Any:
    return Wrapper(torch.randn(3))


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
@pytest.mark.parametrize("make", [sparse, quantized, meta, nested, wrapped])
@pytest.mark.parametrize("where", ["buffer", "values"])
def test_what_is_no_plain_memory_is_refused_before_the_first_step(make: Any, where: str, as_worker: Any) -> None:
    """Case A47, sparse and quantized."""
    as_worker()
    model, values = torch.nn.Linear(2, 2), {}
    if where == "buffer":
        model.register_buffer("odd", make())
    else:
        values["odd"] = make()
    ckpt = gemini_run.Checkpointer(model=model, values=values)
    with pytest.raises(UnsupportedState, match=r"^(model|values)\.odd: "):
        ckpt._snapshotter.preflight()


def test_a_lazy_module_is_refused_before_the_first_step(as_worker: Any) -> None:
    as_worker()
    ckpt = gemini_run.Checkpointer(model=torch.nn.LazyLinear(3))
    with pytest.raises(UnsupportedState, match=r"model\.weight: has no shape yet"):
        ckpt._snapshotter.preflight()


@pytest.mark.parametrize("wrap", ["compile(ddp)", "ddp(compile)", "compiled part"])
def test_names_are_clean_however_the_model_is_wrapped(wrap: str, as_worker: Any) -> None:
    """Case A44: saved in wrappers, restored without them."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        if wrap == "compile(ddp)":
            model: Any = torch.compile(DistributedDataParallel(net), backend="eager")
        elif wrap == "ddp(compile)":
            model = DistributedDataParallel(torch.compile(net, backend="eager"))
        else:
            net[0] = torch.compile(net[0], backend="eager")
            model = net
        as_worker()
        ckpt = gemini_run.Checkpointer(model=model)
        ckpt.step()
        ckpt.close()
        assert sorted(item.name for item in ckpt._snapshotter.manifest.items if item.name.startswith("model.")) == [
            "model.0.bias", "model.0.weight", "model.1.bias", "model.1.weight",
        ]  # fmt: skip
        as_worker(round=1, restore_iteration=1, restore_source="local")
        plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        gemini_run.Checkpointer(model=plain).restore()
        assert all(map(torch.equal, plain.parameters(), net.parameters()))
    finally:
        torch.distributed.destroy_process_group()
