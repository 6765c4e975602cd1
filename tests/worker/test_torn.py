"""Case A21: whenever a worker is killed, what is left holds one single iteration in every tensor."""

from __future__ import annotations

import functools
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import a_while_after, in_a_fork, newest_iteration
from torch import nn

import gemini_run
from gemini_run.wire import MemoryPaths
from gemini_run.worker import capture

TENSORS = 8


class Numbered(nn.Module):
    """Every tensor holds the number of the iteration; the last ones are changed outside of any optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(TENSORS):
            self.register_buffer(f"b{i}", torch.zeros(300 if i % 2 else 300_000))  # above and below a chunk's size

    def fill(self, number: int) -> None:
        for buffer in self.buffers():
            buffer.numpy()[:] = number  # no version counter sees it


def train(log: Path) -> None:
    copy = capture._copy_and_check

    def slow(sources: Any, base: int, lenders: Any) -> list[int]:
        checksums = []
        for source, lender in zip(sources, lenders, strict=True):
            checksums += copy([source], base, [lender])
            time.sleep(0.001)
        return checksums

    capture._copy_and_check = slow
    model = Numbered()
    values = {"number": 0}
    ckpt = gemini_run.Checkpointer(model=model, values=values)
    for step in ckpt.steps(10_000):
        model.fill(step + 1)
        values["number"] = step + 1
        with log.open("a") as file:
            print(step, file=file)


def check(iteration: int) -> None:
    model, values = Numbered(), {"number": 0}
    assert gemini_run.Checkpointer(model=model, values=values).restore() == iteration == values["number"]
    assert {float(x) for buffer in model.buffers() for x in buffer.unique()} == {float(iteration)}


@pytest.mark.parametrize("seed", range(3))
def test_every_state_left_behind_is_of_one_iteration(
    seed: int, as_worker: Any, memory: MemoryPaths, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    log = tmp_path / "log"
    found: int | None = None

    for number in range(5):
        as_worker(round=number, restore_iteration=found, restore_source="none" if found is None else "local")
        assert in_a_fork(lambda: train(log), a_while_after(log, 4, draw.uniform(0, 0.02))) == signal.SIGKILL
        newest = newest_iteration(memory)
        assert newest is not None and newest > (found or 0)
        found = newest
        as_worker(round=number + 1, restore_iteration=found, restore_source="local")
        assert in_a_fork(functools.partial(check, found)) == 0
