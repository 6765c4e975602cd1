"""A training loop over a loader, killed where it is told to, that writes down what it saw; and a noisy dataset.

The dataset draws noise for each sample from every generator there is, so a generator that stands elsewhere shows at
once, in the main process as in the loader's workers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dying import kill_self
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gemini_run

SIZE, EPOCHS = 23, 3


class Noisy(Dataset):
    def __init__(self) -> None:
        self.own = np.random.default_rng(5)
        self.mine = random.Random(6)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = [torch.rand(1).item(), np.random.rand(), random.random(), self.own.random(), self.mine.random()]
        return index, torch.tensor(noise)


def train(make: Callable[[], DataLoader], out: Path, kill: tuple[int, str] | None = None) -> None:
    """An epoch loop. Each iteration is a line of what it saw; `kill`: after how many iterations, and where."""
    torch.manual_seed(7)
    np.random.seed(8)
    random.seed(9)
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = make()
    progress = {"epoch": 0}
    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer, loader=loader, progress=progress)
    ckpt.restore()
    with out.open("a") as log:
        for epoch in range(progress["epoch"], EPOCHS):
            progress["epoch"] = epoch
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for ids, noise in loader:
                if kill == (ckpt.iteration, "in the step"):
                    kill_self()
                loss = model(noise).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                said = [epoch, torch.as_tensor(ids).tolist(), noise.tolist(), loss.item(), torch.rand(1).item()]
                print(json.dumps([ckpt.iteration, *said]), file=log, flush=True)
                ckpt.step()
                if kill == (ckpt.iteration, "between"):
                    kill_self()
    drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
    own = [] if loader.generator is None else [torch.rand(1, generator=loader.generator).item()]
    torch.save([model.state_dict(), optimizer.state_dict(), drawn, own], out.with_suffix(".pt"))
    ckpt.close()


def lines(path: Path) -> dict[int, Any]:
    """Iteration -> what it saw; an iteration that was done again must have seen the same."""
    seen: dict[int, Any] = {}
    for line in path.read_text().splitlines():
        iteration, *said = json.loads(line)
        assert seen.setdefault(iteration, said) == said, iteration
    return seen


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
