"""One rank of the stall bench: trains a model and lets each contender checkpoint every iteration of its blocks.

All contenders share the processes, the model and the optimizer. A round gives each one block of iterations, in an
order drawn from the seed; a block's time runs from one barrier to the next and holds the iterations, the calls and
the wait for everything that the contender left running behind them. Started by bench_stall.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_contenders import CONTENDERS, MODELS, TIMEOUT, Contender, Copy, Nothing, Training

WARM_UP = 2  #: iterations of every contender before anything is timed: slots, plans and caches are made


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
    parser.add_argument("--model", choices=MODELS, required=True)
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

    training = Training(args.model, args.state_mb, args.batch)
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
