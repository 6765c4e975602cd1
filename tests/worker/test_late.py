"""Late copies: no torn snapshot is ever kept, whatever changes the state meanwhile, and what keeps still is kept."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import a_while_after, in_a_fork, newest_iteration
from forks import run_ranks
from torch import nn
from torch.distributed import TCPStore

import gemini_run
from gemini_run.memory.header import build_header
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Manifest
from gemini_run.wire import MemoryPaths
from gemini_run.worker import device, late
from gemini_run.worker.device import word_sum
from gemini_run.worker.layout import PlanBuilder

TENSORS = 6


class Counting(torch.optim.Optimizer):
    """Adds one to every parameter, and keeps a copy of it as its state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter += 1
            self.state[parameter].setdefault("copy", torch.zeros_like(parameter)).copy_(parameter)


class Numbered(nn.Module):
    """Every element of every tensor is the number of the iteration."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [300 if i == 0 else 30_000 for i in range(TENSORS)]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
        self.register_buffer("seen", torch.zeros(30_000))  # changed by the forward, at any time


def slow_copies(pause: float) -> None:
    """Each tensor that is copied late takes `pause` seconds more. For forks only."""
    move = late._move

    def slow(*args: Any) -> None:
        time.sleep(pause)
        move(*args)

    late._move = slow


def train(log: Path | None, total: int, meddle: Any = None, pause: float = 0.002, keep: Any = None) -> None:
    slow_copies(pause)
    model = Numbered()
    optimizer = Counting(model)
    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer)
    for step in ckpt.steps(total):
        model.seen.numpy()[:] = step + 1
        if meddle is not None:
            meddle(step, model, ckpt)
        optimizer.step()
        if log is not None:
            with log.open("a") as file:
                print(step, file=file)
        if keep is not None:
            keep(ckpt)
    ckpt.close()


def holds_one_iteration(iteration: int) -> None:
    model = Numbered()
    optimizer = Counting(model)
    assert gemini_run.Checkpointer(model=model, optimizer=optimizer).restore() == iteration
    tensors = [model.seen, *model.parameters(), *(optimizer.state[p]["copy"] for p in model.parameters())]
    assert {float(x) for tensor in tensors for x in tensor.unique()} == {float(iteration)}


def torn(folder: Path) -> list[dict[str, Any]]:
    lines = (line for path in folder.rglob("events*") for line in path.read_text().splitlines())
    return [event for event in map(json.loads, lines) if event["event"] == "late_copy_torn"]


@pytest.mark.parametrize("seed", range(2))
def test_optimizers_wait_and_a_kill_at_any_moment_leaves_one_iteration(
    seed: int, as_worker: Any, memory: MemoryPaths, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    log = tmp_path / "log"
    found: int | None = None
    for number in range(4):
        as_worker(
            round=number, late_copy="always", restore_iteration=found,
            restore_source="none" if found is None else "local",
        )  # fmt: skip
        assert in_a_fork(lambda: train(log, 10_000), a_while_after(log, 6, draw.uniform(0, 0.05))) == signal.SIGKILL
        newest = newest_iteration(memory)
        reached = int(log.read_text().split()[-1]) + 1
        assert newest is not None and newest > (found or 0) and reached - 2 <= newest <= reached + 1
        found = newest
        as_worker(round=number + 1, restore_iteration=found, restore_source="local")
        assert in_a_fork(functools.partial(holds_one_iteration, found)) == 0
    assert torn(tmp_path) == [], "the guard holds: nothing of it changes before it has arrived"


def clip(step: int, model: Numbered, ckpt: Any) -> None:
    """From iteration 4 on a weight is changed behind the optimizer's back, and changed back again."""
    if step >= 4:
        model.weights[-1].data.numpy()[:1] = step + 0.5
        if ckpt._snapshotter.landing is not None:
            ckpt._snapshotter.landing._copied.wait()
        model.weights[-1].data.numpy()[:1] = step


@pytest.mark.parametrize("end", [5, 9])
def test_what_is_changed_meanwhile_drops_the_snapshot_and_is_copied_at_once_from_then_on(
    end: int, as_worker: Any, memory: MemoryPaths, tmp_path: Path
) -> None:
    as_worker(late_copy="always")
    assert in_a_fork(lambda: train(None, end, clip, pause=0.03)) == 0
    [event] = torn(tmp_path)
    assert (event["iteration"], event["tensors"]) == (4, [f"model.weights.{TENSORS - 1}"])
    assert newest_iteration(memory) == end
    as_worker(round=1, restore_iteration=end, restore_source="local")
    assert in_a_fork(functools.partial(holds_one_iteration, end)) == 0


def test_a_dropped_snapshot_is_none_and_the_one_before_stays(as_worker: Any, memory: MemoryPaths) -> None:
    def ends_in_the_torn_one(step: int, model: Numbered, ckpt: Any) -> None:
        clip(step, model, ckpt)
        if step == 4:
            ckpt._committer.wait()
            assert newest_iteration(memory) == 3
            os._exit(0)

    as_worker(late_copy="always")
    assert in_a_fork(lambda: train(None, 9, ends_in_the_torn_one, pause=0.03)) == 0
    as_worker(round=1, restore_iteration=3, restore_source="local")
    assert in_a_fork(functools.partial(holds_one_iteration, 3)) == 0


def test_what_the_durable_tier_wants_is_not_late(as_worker: Any, memory: MemoryPaths, tmp_path: Path) -> None:
    as_worker(late_copy="always", durable_iterations=4)
    landings = tmp_path / "landings"

    def keep(ckpt: Any) -> None:
        with landings.open("a") as file:
            print(int(ckpt._snapshotter.landing is not None), file=file)

    assert in_a_fork(lambda: train(None, 6, keep=keep)) == 0
    # Seen before each boundary: nothing yet, then what the boundary before left.
    assert landings.read_text().split() == ["0", "1", "1", "1", "0", "1"]


def test_all_ranks_of_a_node_drop_what_one_cannot_keep(
    as_worker: Any, memory: MemoryPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> None:
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("LOCAL_RANK", str(number))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        torch.set_num_threads(1)
        committed = []

        def keep(ckpt: Any) -> None:
            ckpt._committer.wait()
            committed.append(ckpt._committer.record.iteration)
            assert ckpt._committer.problem is None

        train(None, 9, clip if number else None, pause=0.03, keep=keep)
        assert committed == [0, 1, 2, 3, 3, 5, 6, 7, 8]

    as_worker(late_copy="always", store_port=store.port)
    assert run_ranks(2, rank) == [0, 0]
    [event] = torn(tmp_path)
    assert event["rank"] == 1
    assert newest_iteration(memory) == 9


def test_the_digest_is_of_every_byte() -> None:
    torch.manual_seed(0)
    for length in (0, 1, 4, 4096, 4099):
        data = torch.randint(0, 256, (length,), dtype=torch.uint8)
        for words in (True, False):
            whole = int(word_sum(data, words))
            for at in {0, length // 2, length - 1} & set(range(length)):
                other = data.clone()
                other[at] ^= 128
                assert int(word_sum(other, words)) != whole, (length, at)


class Streams:
    """Stands for torch.cuda where there is no device: says what is asked of which stream, and does it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.now = "training"
        streams = self

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name = name if name == "training" else "side"

            def wait_stream(self, other: Stream) -> None:
                streams.said.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                streams.said.append(f"{self.name} waits for the end")

        class Event:
            def record(self, stream: Stream) -> None:
                streams.said.append(f"end of {stream.name}")

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                streams.said.append("the host waits for the end")

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, self.now = self.now, stream.name
            yield
            self.now = before

        def copied(slot: Any, header: Any, source: Any) -> list[torch.Tensor]:
            self.said.append(f"{self.now} copies {source.length}")
            return copy(slot, header, source)

        def summed(flat: torch.Tensor, words: bool) -> torch.Tensor:
            self.said.append(f"{self.now} sums {flat.numel()}")
            return word_sum(flat, words)

        copy, empty = device._copy, torch.empty
        monkeypatch.setattr(device, "_copy", copied)
        monkeypatch.setattr(device, "word_sum", summed)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "device", lambda which: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda which: Stream("training"))
        monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **more: empty(*sizes, **more))


def test_the_order_of_copies_from_a_device(memory: MemoryPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not late is copied before training goes on; nothing waits on the host before the commit thread does."""
    builder = PlanBuilder()
    tensors = [torch.full((size,), float(size)) for size in (10, 20, 30)]
    for tensor in tensors:
        builder.add(str(tensor.numel()), tensor)
    manifest = Manifest(0, 1, 1, tuple(builder.items))
    header = build_header(
        manifest_text=manifest.to_json(), num_items=3, payload_length=manifest.payload_length, objects=b"", round=0,
        iteration=1, owner=0, world_size=1,
    )  # fmt: skip
    slot = Slot.create(memory.slot(0, 0), header.end)
    slot.begin()
    streams = Streams(monkeypatch)
    one, two, three = builder.sources
    landing = device.DeviceCopier().start(slot, header, [one], [(1, "20", two), (2, "30", three)])
    assert streams.said == [
        "training sums 80", "training sums 120", "side waits for training", "side copies 40",
        "training waits for side", "side copies 80", "side copies 120", "end of side",
    ]  # fmt: skip
    streams.said.clear()
    landing.guard()
    assert streams.said == ["training waits for the end"]
    slot.payload(header)[three.offset] ^= 1
    assert landing.finish() == [(2, "30")] and not slot.header_hold()
    assert streams.said[1] == "the host waits for the end"
    slot.payload(header)[three.offset] ^= 1
    assert landing.finish() == [] and slot.header().complete
    for source, tensor in zip(builder.sources, tensors, strict=True):
        there = slot.payload(header)[source.offset : source.offset + source.length]
        assert torch.equal(torch.frombuffer(bytearray(there), dtype=torch.float32), tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["auto", "never"])
def test_state_on_a_cuda_device(mode: str, as_worker: Any, memory: MemoryPaths, tmp_path: Path) -> None:
    """Run where a device is there: not in a fork, since the device may be in use already."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 512)).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(64, 512, device="cuda")).square().mean().backward()
            optimizer.step()

    expected, whole = made()
    run(expected, whole, range(12))
    model, optimizer = made()
    as_worker(late_copy=mode)
    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer)
    run(model, optimizer, ckpt.steps(7))
    ckpt.close()
    assert torn(tmp_path) == [] and newest_iteration(memory) == 7
    as_worker(round=1, late_copy=mode, restore_iteration=7, restore_source="local")
    model, optimizer = made()
    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer)
    run(model, optimizer, ckpt.steps(12))
    ckpt.close()
    for one, two in zip(expected.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(whole.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)
