"""The data position where scripts do something else, and where it cannot be exact: then one line says so."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dataloop import SIZE, Noisy, equal, lines, train
from dying import until_the_end
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

import gemini_run
from gemini_run.wire import MemoryPaths


def loader(**options: Any) -> DataLoader:
    return DataLoader(Noisy(), **{"batch_size": 4, "shuffle": True, **options})


def seed(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def resume(as_worker: Any, iteration: int, **changes: Any) -> None:
    as_worker(round=1, restore_iteration=iteration, restore_source="local", **changes)


def ids(batch: Any) -> list[int]:
    return torch.as_tensor(batch[0]).tolist()


def test_the_loader_itself_is_followed(as_worker: Any) -> None:
    as_worker()
    given = DataLoader(Noisy(), 4, sampler=DistributedSampler(Noisy(), 2, 0))
    kind = type(given)
    ckpt = gemini_run.Checkpointer(loader=given)
    assert ckpt.loader is given and isinstance(given, kind) and type(given).__name__ == "DataLoader"
    assert len(given) == 3 and isinstance(given.dataset, Noisy) and given.batch_size == 4
    given.sampler.set_epoch(4)
    assert given.sampler.epoch == 4
    iterator = iter(given)
    assert iter(iterator) is iterator and len(iterator) == 3 and len(list(iterator)) == 3


def test_no_loader_is_no_attribute(as_worker: Any) -> None:
    as_worker()
    with pytest.raises(AttributeError, match="loader="):
        _ = gemini_run.Checkpointer(values={}).loader


def test_outside_gemini_run_a_loader_is_left_alone() -> None:
    given = loader()
    ckpt = gemini_run.Checkpointer(loader=given)
    assert type(given) is DataLoader and ckpt.loader is given


def test_skipped_samples_are_not_loaded(as_worker: Any) -> None:
    class Counted(Noisy):
        loaded = 0

        def __getitem__(self, index: int) -> Any:
            Counted.loaded += 1
            return super().__getitem__(index)

    as_worker()
    given = DataLoader(Counted(), 4)
    ckpt = gemini_run.Checkpointer(loader=given)
    for _ in zip(ckpt.steps(4), given, strict=False):
        pass
    ckpt.close()
    Counted.loaded = 0
    resume(as_worker, 4)
    given = DataLoader(Counted(), 4)
    gemini_run.Checkpointer(loader=given).restore()
    assert ids(next(iter(given))) == [16, 17, 18, 19] and Counted.loaded == 4


@pytest.mark.parametrize("taken", [0, 5, 6, 8])
@pytest.mark.parametrize("early", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["alone", "workers"])
def test_a_loop_over_steps(as_worker: Any, taken: int, early: bool, options: dict[str, Any]) -> None:
    """`next()` of an iterator that the script makes before or after `restore()`, in processes seeded differently."""

    def run(total: int, start: int) -> list[Any]:
        seed(start)
        given = loader(**options)
        ckpt = gemini_run.Checkpointer(loader=given)
        if not early:
            ckpt.restore()
        batches = iter(given)
        seen = []
        for step in ckpt.steps(total):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(given)
                batch = next(batches)
            seen.append([step, ids(batch), batch[1].tolist(), torch.rand(1).item()])
        ckpt.close()
        return seen

    if taken == 0:
        as_worker()
        assert run(3, 1) == run(3, 1) != run(3, 2)
        return
    as_worker()
    whole = run(14, 1)
    as_worker()
    first = run(taken, 1)
    resume(as_worker, taken)
    assert first + run(14, 2) == whole


def test_a_script_that_reseeds_at_each_epoch(as_worker: Any) -> None:
    def run(total: int) -> list[Any]:
        given, progress = loader(), {"epoch": 0}
        ckpt = gemini_run.Checkpointer(loader=given, progress=progress)
        ckpt.restore()
        seen = []
        for epoch in range(progress["epoch"], 3):
            progress["epoch"] = epoch
            seed(epoch)
            for batch in given:
                seen.append([ids(batch), batch[1].tolist()])
                ckpt.step()
                if ckpt.iteration == total:
                    ckpt.close()
                    return seen
        return seen

    as_worker()
    whole = run(15)
    as_worker()
    first = run(8)
    resume(as_worker, 8)
    assert first + run(15) == whole


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["alone", "workers"])
def test_a_pass_that_was_left_is_over(as_worker: Any, options: dict[str, Any]) -> None:
    """`break`, then a snapshot with no iterator in use: the next iter() is a new pass."""

    def run(rounds: range) -> list[Any]:
        given = loader(**options)
        ckpt = gemini_run.Checkpointer(loader=given)
        ckpt.restore()
        seen = []
        for _ in rounds:
            for number, batch in enumerate(given):
                seen.append(ids(batch))
                if number == 2:
                    break
            ckpt.step()
        ckpt.close()
        return seen

    seed(1)
    as_worker()
    whole = run(range(4))
    seed(1)
    as_worker()
    first = run(range(2))
    seed(2)
    resume(as_worker, 2)
    assert first + run(range(2, 4)) == whole


def test_a_batch_that_fails_is_passed_over_once(as_worker: Any) -> None:
    class Failing(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 6:
                raise OSError("unreadable")
            return super().__getitem__(index)

    as_worker()
    given = DataLoader(Failing(), 4)
    ckpt = gemini_run.Checkpointer(loader=given)
    batches = iter(given)
    next(batches)
    with pytest.raises(OSError, match="unreadable"):
        next(batches)
    assert ids(next(batches)) == [8, 9, 10, 11]
    ckpt.step()
    ckpt.close()
    resume(as_worker, 1)
    given = DataLoader(Failing(), 4)
    gemini_run.Checkpointer(loader=given).restore()
    assert ids(next(iter(given))) == [12, 13, 14, 15]


@pytest.mark.parametrize("inside", [True, False])
def test_workers_end_with_the_loader_that_has_them(inside: bool, as_worker: Any) -> None:
    """By reference counts: in a cycle, the queues that tell them to end may be gone first."""
    if inside:
        as_worker()
    given = loader(num_workers=2, persistent_workers=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer, loader=given)
    others = set(multiprocessing.active_children())
    next(iter(given))
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    gc.disable()
    try:
        del ckpt, given
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_an_optimizer_is_freed_by_reference_counts(as_worker: Any) -> None:
    as_worker()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer)
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del ckpt, optimizer
        assert alive() is None
    finally:
        gc.enable()


def test_a_copy_of_the_loader_is_not_followed(as_worker: Any) -> None:
    as_worker()
    given = loader()
    ckpt = gemini_run.Checkpointer(loader=given)
    assert len(list(copy.copy(given))) == 6
    ckpt.step()
    assert ckpt._components[1].dynamic(lambda *_: None)["passes"] == 0


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from ((i, torch.rand(1)) for i in range(SIZE))


class StatefulStream(IterableDataset):
    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < SIZE:
            self.next += 1
            yield self.next, torch.rand(1)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_an_iterable_dataset_with_state(as_worker: Any) -> None:
    def run(total: int) -> list[Any]:
        given = DataLoader(StatefulStream(), 4)
        ckpt = gemini_run.Checkpointer(loader=given)
        ckpt.restore()
        seen = []
        while True:
            for batch in given:
                seen.append([ids(batch), batch[1].tolist()])
                ckpt.step()
                if ckpt.iteration == total:
                    ckpt.close()
                    return seen

    seed(1)
    as_worker()
    whole = run(14)
    seed(1)
    as_worker()
    first = run(8)
    seed(2)
    resume(as_worker, 8)
    assert first + run(14) == whole


class OwnWay(DataLoader):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: DataLoader(Stream(), 4), "its IterableDataset has no state_dict"),
        (lambda: DataLoader(StatefulStream(), 4, num_workers=2), "StatefulDataLoader"),
        (lambda: DataLoader(Noisy(), 4, num_workers=2, in_order=False), "in_order=False"),
        (lambda: OwnWay(Noisy(), 4), "its class OwnWay iterates in its own way"),
    ],
    ids=["iterable", "iterable in workers", "out of order", "subclass"],
)
def test_what_cannot_be_followed_is_named_once(make: Any, why: str, as_worker: Any, capfd: Any) -> None:
    as_worker()
    given = make()
    ckpt = gemini_run.Checkpointer(data=given)
    for _ in zip(ckpt.steps(3), given, strict=False):
        pass
    ckpt.close()
    said = capfd.readouterr().err
    assert said.count("warning: Checkpointer(data=...)") == 1 and why in said
    resume(as_worker, 3)
    ckpt = gemini_run.Checkpointer(data=make())
    assert ckpt.restore() == 3


class Interleaved(Sampler[int]):
    """Draws from the generator that training draws from, sample by sample: a replay sees other draws."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(SIZE, (1,)))

    def __len__(self) -> int:
        return SIZE


@pytest.mark.parametrize("draws", [True, False])
def test_a_sampler_that_cannot_be_replayed_is_found_out(draws: bool, as_worker: Any, capfd: Any) -> None:
    as_worker()
    given = DataLoader(range(SIZE), 4, sampler=Interleaved())
    ckpt = gemini_run.Checkpointer(loader=given)
    for _, _batch in zip(ckpt.steps(3), given, strict=False):
        torch.rand(int(draws))
    ckpt.close()
    resume(as_worker, 3)
    given = DataLoader(range(SIZE), 4, sampler=Interleaved())
    gemini_run.Checkpointer(loader=given).restore()
    next(iter(given))
    assert ("its sampler did not draw the 3 batches" in capfd.readouterr().err) == draws


def test_two_iterators_at_once_are_named(as_worker: Any, capfd: Any) -> None:
    as_worker()
    given = loader()
    ckpt = gemini_run.Checkpointer(loader=given)
    pairs = zip(given, given, strict=True)
    for _ in ckpt.steps(2):
        next(pairs)
    ckpt.close()
    assert capfd.readouterr().err.count("more than one iterator") == 1


def test_only_the_first_rank_of_a_node_warns(as_worker: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker()
    monkeypatch.setenv("LOCAL_RANK", "1")
    gemini_run.Checkpointer(loader=DataLoader(Stream(), 4))
    assert "warning" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_torchdata(
    workers: int, persistent: bool, as_worker: Any, memory: MemoryPaths, tmp_path: Path, monkeypatch: Any
) -> None:
    """A StatefulDataLoader says its position itself; the generators stand where they do without a restart."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        data = [(i, torch.full((5,), i / SIZE)) for i in range(SIZE)]  # torchdata keeps no generators of workers
        options = {"persistent_workers": persistent, "snapshot_every_n_steps": 1}
        return stateful.StatefulDataLoader(data, batch_size=4, shuffle=True, num_workers=workers, **options)

    kills = [(2, "between"), (3, "in the step"), (6, "between"), (9, "between")]
    want, got = tmp_path / "want", tmp_path / "got"
    until_the_end(as_worker, memory, lambda number: train(make, got, [*kills, None][number]), len(kills))
    monkeypatch.delenv("GEMINI_WORKER")
    train(make, want)
    assert lines(got) == lines(want) and len(lines(want)) == 18
    assert equal(torch.load(got.with_suffix(".pt")), torch.load(want.with_suffix(".pt")))
