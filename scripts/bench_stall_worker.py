"""One rank of the stall bench: trains a DDP model and lets each contender checkpoint every iteration of its blocks.

All contenders share the processes, the model and the optimizer. A round gives each one block of iterations, in an
order drawn from the seed; a block's time runs from one barrier to the next and holds the iterations, the calls and
the wait for everything that the contender left running behind them. Started by bench_stall.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import mmap
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn.parallel import DistributedDataParallel

import gemini_run
from gemini_run.wire import WorkerContext

HIDDEN_LAYERS = 6
BYTES_PER_PARAMETER = 12  #: fp32: the parameter and AdamW's two moments
WARM_UP = 2  #: iterations of every contender before anything is timed: slots, plans and caches are made
TIMEOUT = timedelta(minutes=3)


class Contender:
    """A way to checkpoint: called at the end of every iteration of its blocks, on every rank."""

    def save(self) -> None:
        """The call whose duration is the stall."""

    def finish(self) -> None:
        """Wait until the last checkpoint is as safe as this contender makes it."""

    def close(self) -> None:
        """Free what it holds."""


class Training:
    """The model, its optimizer, and one iteration."""

    def __init__(self, state_mb: float, batch: int) -> None:
        width = max(8, round(math.sqrt(state_mb * 1e6 / BYTES_PER_PARAMETER / HIDDEN_LAYERS)))
        torch.manual_seed(0)
        layers = [layer for _ in range(HIDDEN_LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*layers)
        self._ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._input = torch.randn(batch, width)

    def iteration(self) -> None:
        self._ddp(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """All of the state, once the first step has made the moments."""
        moments = [v for entry in self.optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]
        return [*self.model.parameters(), *moments]


class Nothing(Contender):
    """Training alone: what every slowdown is counted from."""


class Copy(Contender):
    """The state's bytes into mapped, populated shared memory with memmove and nothing else: the floor."""

    def __init__(self, training: Training, directory: Path) -> None:
        self._sources = [(t.data_ptr(), t.numel() * t.element_size()) for t in training.tensors()]
        self.num_bytes = sum(length for _, length in self._sources)
        path = directory / f"floor.{os.getpid()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            self._map = mmap.mmap(descriptor, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
            path.unlink()
        self._target = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def save(self) -> None:
        at = self._target
        for pointer, length in self._sources:
            ctypes.memmove(at, pointer, length)
            at += length


class GeminiRun(Contender):
    """gemini_run.Checkpointer: a slot in host memory, and the peers' replicas where there are other nodes."""

    def __init__(self, training: Training) -> None:
        if WorkerContext.from_env() is None:
            raise RuntimeError("not started by gemini-run: there is no node memory to checkpoint into")
        self._checkpointer = gemini_run.Checkpointer(model=training.model, optimizer=training.optimizer)
        self._checkpointer.restore()

    def save(self) -> None:
        self._checkpointer.step()

    def finish(self) -> None:
        committer = self._checkpointer._committer
        if committer is None:
            raise RuntimeError("the checkpointer does not run")
        committer.wait()
        if committer.problem is not None:
            raise RuntimeError(committer.problem)
        if committer.record.iteration != self._checkpointer.iteration:
            raise RuntimeError(
                f"iteration {self._checkpointer.iteration} was not checkpointed, only {committer.record.iteration}"
            )

    def close(self) -> None:
        self._checkpointer.close()


class TorchSave(Contender):
    """torch.save by rank 0, the usual pattern with DDP: beside the old file, then os.replace."""

    def __init__(self, training: Training, directory: Path) -> None:
        self._training = training
        self._path = directory / "torch-save.pt"

    def save(self) -> None:
        if dist.get_rank() == 0:
            beside = self._path.with_suffix(".new")
            torch.save(self._training.state(), beside)
            os.replace(beside, self._path)

    def close(self) -> None:
        if dist.get_rank() == 0:
            self._path.unlink(missing_ok=True)


class Dcp(Contender):
    """torch.distributed.checkpoint.save by all ranks, into two directories in turn: the one before stays whole."""

    def __init__(self, training: Training, directory: Path, name: str) -> None:
        self._training = training
        self._directories = [directory / f"{name}.{index}" for index in (0, 1)]
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._turn = 0

    def save(self) -> None:
        dcp.save(self._training.state(), checkpoint_id=self._next(), process_group=self._group)

    def _next(self) -> Path:
        self._turn ^= 1
        return self._directories[self._turn]

    def close(self) -> None:
        if dist.get_rank() == 0:
            for directory in self._directories:
                shutil.rmtree(directory, ignore_errors=True)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save, each awaited before the next one; staging as it is by default."""

    def __init__(self, training: Training, directory: Path, name: str, kind: AsyncCheckpointerType) -> None:
        super().__init__(training, directory, name)
        self._kind = kind
        self._pending: Future[Any] | None = None

    def save(self) -> None:
        self.finish()
        response = dcp.async_save(
            self._training.state(), checkpoint_id=self._next(), process_group=self._group,
            async_checkpointer_type=self._kind,
        )  # fmt: skip
        self._pending = response if isinstance(response, Future) else response.upload_completion

    def finish(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


CONTENDERS: dict[str, Callable[[Training, Path], Contender]] = {
    "none": lambda training, directory: Nothing(),
    "copy": lambda training, directory: Copy(training, directory),
    "gemini-run": lambda training, directory: GeminiRun(training),
    "torch.save": lambda training, directory: TorchSave(training, directory),
    "dcp.save": lambda training, directory: Dcp(training, directory, "dcp-save"),
    "dcp.async_save": lambda training, directory: DcpAsync(
        training, directory, "dcp-async", AsyncCheckpointerType.THREAD
    ),
    "dcp.async_save process": lambda training, directory: DcpAsync(
        training, directory, "dcp-async-process", AsyncCheckpointerType.PROCESS
    ),
}


class Lane:
    """A contender and what was measured of it. One that fails is out, with its error, and never holds up the others."""

    def __init__(self, name: str, training: Training, directory: Path) -> None:
        self.name = name
        self._training = training
        self._contender: Contender = Nothing()
        self.error: str | None = None
        self.blocks: list[float] = []  #: seconds per iteration, one for each block
        self.stalls: list[float] = []  #: seconds of each call on this rank
        self.waits: list[float] = []  #: seconds at a block's end for what ran behind
        with self._failing():
            self._contender = CONTENDERS[name](training, directory)

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a contender raises is its result
            text = " ".join(str(error).split()) or repr(error)
            self.error = f"rank {dist.get_rank()}: {type(error).__name__}: {text[:300]}"

    def block(self, iterations: int, *, keep: bool) -> None:
        """Run one block. After a failure training goes on without calls: the other rank is in the same collectives."""
        stalls: list[float] = []
        dist.barrier()
        started = time.perf_counter()
        for _ in range(iterations):
            self._training.iteration()
            if self.error is None:
                called = time.perf_counter()
                with self._failing():
                    self._contender.save()
                stalls.append(time.perf_counter() - called)
        waiting = time.perf_counter()
        if self.error is None:
            with self._failing():
                self._contender.finish()
        waited = time.perf_counter() - waiting
        dist.barrier()
        seconds = time.perf_counter() - started
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self.error)
        self.error = next((error for error in errors if error), None)
        if keep and self.error is None:
            self.blocks.append(seconds / iterations)
            self.stalls.extend(stalls)
            self.waits.append(waited)

    def close(self) -> None:
        with self._failing():
            self._contender.close()


def copy_alone(floor: Copy, times: int) -> list[float]:
    """Seconds of `times` copies of the state, each started on all ranks at once."""
    found = []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        floor.save()
        found.append(time.perf_counter() - started)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--block", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--contenders", required=True, help="names, separated by commas")
    parser.add_argument("--directory", type=Path, required=True, help="in shared memory; the files of the contenders")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)

    training = Training(args.state_mb, args.batch)
    for _ in range(WARM_UP):
        training.iteration()
    floor = Copy(training, args.directory)
    lanes = [Lane(name, training, args.directory) for name in args.contenders.split(",")]
    for lane in lanes:
        lane.block(WARM_UP, keep=False)
    floor_seconds: list[float] = []
    order = random.Random(args.seed)  # the same on every rank
    for _ in range(args.rounds):
        for lane in order.sample(lanes, len(lanes)):
            lane.block(args.block, keep=True)
        floor_seconds += copy_alone(floor, args.block)
    for lane in lanes:
        lane.close()

    mine = {
        "floor": floor_seconds,
        "lanes": {
            lane.name: {"error": lane.error, "blocks": lane.blocks, "stalls": lane.stalls, "waits": lane.waits}
            for lane in lanes
        },
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        facts = {
            "state_bytes": floor.num_bytes,
            "parameters": sum(p.numel() for p in training.model.parameters()),
            "world_size": dist.get_world_size(),
            "ranks": ranks,
        }
        args.out.write_text(json.dumps(facts), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
