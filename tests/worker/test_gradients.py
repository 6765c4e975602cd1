"""Gradients are copied where they outlive a boundary, and only there. (That they come back: test_contents.py.)"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_run
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.wire import MemoryPaths


def gradients_in(memory: MemoryPaths, iteration: int) -> int:
    """How many gradients the snapshot of `iteration` holds."""
    path = next(i.path for i in scan_slots(memory) if i.usable and i.header and i.header.iteration == iteration)
    slot = Slot(path)
    return sum(item.name.startswith("gradients.") for item in slot.manifest(slot.header()).items)


class Script:
    def __init__(self, **more: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ckpt = gemini_run.Checkpointer(model=self.model, optimizer=self.optimizer, **more)
        self.ckpt.restore()

    def backward(self) -> None:
        self.model(torch.randn(2, 4)).square().sum().backward()


def zero_first(script: Script, i: int) -> None:
    script.optimizer.zero_grad()
    script.backward()
    script.optimizer.step()


def zero_last(script: Script, i: int) -> None:
    script.backward()
    script.optimizer.step()
    script.optimizer.zero_grad()


def zero_the_model(script: Script, i: int) -> None:
    script.model.zero_grad()
    script.backward()
    script.optimizer.step()


def never_zero(script: Script, i: int) -> None:
    script.backward()
    script.optimizer.step()


def no_longer_zero(script: Script, i: int) -> None:
    if i < 2:
        script.optimizer.zero_grad()
    script.backward()
    script.optimizer.step()


def windows_of_two(script: Script, i: int) -> None:
    script.backward()
    if i % 2:
        script.optimizer.step()
        script.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("iterate", "held"),
    [
        (zero_first, [0, 0, 0, 0]),
        (zero_last, [0, 0, 0, 0]),
        (zero_the_model, [4, 0, 0, 0]),  # at the first boundary nothing is known yet
        (never_zero, [4, 4, 4, 4]),
        (no_longer_zero, [0, 0, 4, 4]),
        (windows_of_two, [4, 0, 4, 0]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_snapshot_holds(
    iterate: Callable[[Script, int], None], held: list[int], as_worker: Any, memory: MemoryPaths
) -> None:
    as_worker()
    script = Script()
    found = []
    for i in script.ckpt.steps(len(held)):
        if i:
            found.append(gradients_in(memory, i))
        iterate(script, i)
    script.ckpt.close()
    assert [*found, gradients_in(memory, len(held))] == held


def test_what_was_learned_outlives_a_restart(as_worker: Any, memory: MemoryPaths) -> None:
    as_worker()
    script = Script()
    for i in script.ckpt.steps(3):
        zero_the_model(script, i)
    script.ckpt.close()
    as_worker(round=1, restore_iteration=3, restore_source="local")
    script = Script()
    zero_the_model(script, 3)
    script.ckpt.step()
    script.ckpt.close()
    assert gradients_in(memory, 4) == 0


def test_a_step_that_the_scaler_skipped_leaves_nothing(as_worker: Any, memory: MemoryPaths) -> None:
    as_worker()
    scaler = torch.amp.GradScaler("cpu")
    script = Script(scaler=scaler)
    for i in script.ckpt.steps(2):
        script.optimizer.zero_grad()
        loss = script.model(torch.randn(2, 4)).sum() * (float("inf") if i else 1.0)
        scaler.scale(loss).backward()
        scaler.step(script.optimizer)
        scaler.update()
    script.ckpt.close()
    assert gradients_in(memory, 1) == gradients_in(memory, 2) == 0


def test_a_copied_optimizer_is_a_plain_one(as_worker: Any) -> None:
    as_worker()
    script = Script()
    script.backward()
    other = copy.deepcopy(script.optimizer)
    assert "zero_grad" not in vars(other)
    other.zero_grad()
    assert script.model[0].weight.grad is not None
