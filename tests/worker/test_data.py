"""The data position of a plain DataLoader: killed inside epochs and resumed, against the uninterrupted run.

The dataset draws noise for each sample from every generator there is, so a generator that stands elsewhere shows at
once, in the main process as in the loader's workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataloop import EPOCHS, SIZE, Noisy, equal, lines, train
from dying import until_the_end
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from gemini_run.wire import MemoryPaths

PER_EPOCH = 6  # batches of 4, the last one ragged


class Shuffled(Sampler[int]):
    """Draws each order from a generator of its own that goes on from pass to pass."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(3)
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(self.generator.permutation(SIZE) if self.passes % 2 else range(SIZE))

    def __len__(self) -> int:
        return SIZE


class Cumulative(BatchSampler):
    """Shuffles the order of the pass before: only its state_dict can say where it stands."""

    def __init__(self) -> None:
        self.order = list(range(SIZE))

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.order)
        for start in range(0, SIZE, 4):
            yield self.order[start : start + 4]

    def __len__(self) -> int:
        return PER_EPOCH

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


LOADERS: dict[str, Callable[[int], DataLoader]] = {
    "sequential": lambda n: DataLoader(Noisy(), 4, num_workers=n),
    "shuffle": lambda n: DataLoader(Noisy(), 4, shuffle=True, num_workers=n),
    "generator": lambda n: DataLoader(Noisy(), 4, shuffle=True, generator=seeded(), num_workers=n),
    "distributed": lambda n: DataLoader(Noisy(), 2, sampler=DistributedSampler(Noisy(), 2, 1, seed=4), num_workers=n),
    "own_sampler": lambda n: DataLoader(Noisy(), 4, sampler=Shuffled(), num_workers=n),
    "own_batches": lambda n: DataLoader(Noisy(), batch_sampler=Cumulative(), num_workers=n),
    "weighted": lambda n: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE), num_workers=n),
    "replacement": lambda n: DataLoader(
        Noisy(), 4, sampler=RandomSampler(Noisy(), True, SIZE, seeded()), num_workers=n
    ),
    "unbatched": lambda n: DataLoader(Noisy(), None, sampler=RandomSampler(Noisy(), num_samples=6), num_workers=n),
    "subset": lambda n: DataLoader(Subset(Noisy(), range(21)), 4, shuffle=True, drop_last=False, num_workers=n),
    "persistent": lambda n: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "prefetch": lambda n: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, prefetch_factor=4),
    "spawned": lambda n: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, multiprocessing_context="forkserver"),
    "reseeded": lambda n: DataLoader(Noisy(), 4, shuffle=True, num_workers=n, worker_init_fn=np.random.seed),
}
CASES = [(name, 0) for name in LOADERS if name not in ("persistent", "prefetch", "spawned", "reseeded")]
CASES += [(name, 2) for name in ("shuffle", "generator", "distributed", "own_batches", "persistent", "prefetch")]
CASES += [("unbatched", 2), ("reseeded", 2)]


@pytest.mark.parametrize(("name", "workers"), CASES, ids=[f"{name}-{workers}" for name, workers in CASES])
def test_killed_runs_see_every_sample_as_the_uninterrupted_one(
    name: str, workers: int, as_worker: Any, memory: MemoryPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases A36 and A38."""

    def make() -> DataLoader:
        return LOADERS[name](workers)

    kills = [(2, "between"), (3, "in the step"), (6, "between"), (9, "between"), (12, "in the step")]
    if make().num_workers:
        kills = [(3, "between"), (6, "between"), (8, "in the step")]
    want, got = tmp_path / "want", tmp_path / "got"
    until_the_end(as_worker, memory, lambda number: train(make, got, [*kills, None][number]), len(kills))
    monkeypatch.delenv("GEMINI_WORKER")
    train(make, want)  # not under gemini-run: the loader is torch's own, untouched
    expected = lines(want)
    assert lines(got) == expected and len(expected) == EPOCHS * PER_EPOCH
    if name not in ("weighted", "replacement", "unbatched"):
        for epoch in range(EPOCHS):
            ids = [i for said in expected.values() if said[0] == epoch for i in said[1]]
            assert len(ids) == len(set(ids)) >= (SIZE // 2 if name == "distributed" else 21)
    assert equal(torch.load(got.with_suffix(".pt")), torch.load(want.with_suffix(".pt")))
