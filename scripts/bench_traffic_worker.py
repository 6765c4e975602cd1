"""One rank of the traffic bench: trains over a slow link and gives each way of sending replicas its blocks.

Arithmetic is stood in for by sleeping, as on an accelerator: two nodes' worth of it on one machine's cores would
compete with gloo for them. Collectives, copies and replicas are real.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gemini_run
from gemini_run.peers.transport import Exchange, Traffic
from gemini_run.plan.schedule import SUB_BUFFERS

LAYERS, ROWS = 6, 16
WAYS = ("none", "no replicas", "blocking", "naive", "one buffer", "scheduled")
NONE, COPY, BLOCKING, NAIVE, ONE_BUFFER, SCHEDULED = WAYS
SETTLE, WARM_UP = 2, 100


class Compute(torch.autograd.Function):
    """Takes its time forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    def __init__(self, width: int, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self._seconds = forward, backward

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Compute.apply(self.linear(rows), *self._seconds))


class OwnState(nn.Module):
    """What each rank holds for itself, so that its replica must be sent (data parallelism's alike is not)."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.full((num_bytes // 4,), float(dist.get_rank())))


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width = int((args.layer_mb * 1e6 / 4) ** 0.5)
        layers = [Layer(width, args.forward / LAYERS, args.backward / LAYERS) for _ in range(LAYERS)]
        model = nn.Sequential(*layers)
        objects: dict[str, Any] = {}
        self.own = None
        if args.kind == "fsdp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            self.wrapped: nn.Module = fully_shard(model, mesh=mesh)
        else:
            self.wrapped = DistributedDataParallel(model, bucket_cap_mb=args.layer_mb)
            self.own = objects["own"] = OwnState(int(args.own_mb * 1e6))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.rows, self.update = torch.randn(ROWS, width), args.update
        self.ckpt = gemini_run.Checkpointer(**objects, model=model, optimizer=self.optimizer)
        self.ckpt.restore()
        committer, pace = self.ckpt._committer, self.ckpt._traffic.pace
        assert committer is not None and pace is not None
        self.committer, self.pace = committer, pace
        self.budget = pace._budget
        self.exchange = Exchange.run

    def iteration(self, way: str) -> None:
        self.optimizer.zero_grad()
        self.wrapped(self.rows).square().mean().backward()
        self.optimizer.step()
        if self.own is not None:
            self.own.values.add_(1.0)
        time.sleep(self.update)
        if way == NONE:
            return
        self.ckpt.step()
        if way == BLOCKING:
            self.committer.wait()
        if self.committer.problem:
            raise RuntimeError(self.committer.problem)

    def warm_up(self) -> int:
        """Iterations until every rank has its plan."""
        done = self.until(SCHEDULED, lambda: self.pace.plan is not None)
        self.pace._reprofile_after = 10**9  # all blocks with the same plan
        return done

    def until(self, way: str, ready: Callable[[], bool]) -> int:
        """Train until every rank is `ready`; returns the iterations."""
        for done in range(1, WARM_UP + 1):
            self.iteration(way)
            flag = torch.tensor([ready()], dtype=torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            if flag.item():
                return done
        raise RuntimeError(f"{way}: not ready after {WARM_UP} iterations")

    def in_force(self) -> bool:
        """Whether the newest commit record has the interval that this rank wants: a longer one lasts one more turn."""
        record = self.committer.record
        return record.next_iteration - record.iteration == record.following == self.pace.wish.iterations

    def choose(self, way: str) -> None:
        plan = self.pace.plan
        assert plan is not None
        self.pace._budget = self.budget if way in (ONE_BUFFER, SCHEDULED) else None
        send = self.exchange if way != COPY else lambda *_, **__: Traffic(0, False)
        Exchange.run = send  # type: ignore[method-assign, assignment]
        self.pace._sub_buffers = 1 if way == ONE_BUFFER else SUB_BUFFERS
        if self.pace._budget is not None:
            self.pace._adopt(plan.profile, plan.link)

    def block(self, way: str, iterations: int) -> dict[str, Any]:
        self.choose(way)
        if way != NONE:
            self.until(way, self.in_force)
        for _ in range(SETTLE):
            self.iteration(way)
        times = []
        dist.barrier()
        first = self.ckpt.iteration
        waits = []
        for _ in range(iterations):
            started = time.perf_counter()
            self.iteration(way)
            times.append(time.perf_counter() - started)
            waits.append(self.ckpt._progress.state.stall)
        record = self.committer.record
        self.pace.urge()
        self.committer.wait()
        dist.barrier()
        committed = self.committer.record.iteration - first
        if way != NONE and record.following == 1 and committed != iterations:
            raise RuntimeError(f"{way}: {committed} of {iterations} iterations were committed")
        return {"seconds": times, "stall": waits, "interval": record.following, "committed": committed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("ddp", "fsdp"), required=True)
    for name in ("layer-mb", "own-mb", "forward", "backward", "update"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("rounds", "block", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = Bench(args)
    warm_up = bench.warm_up()
    lanes: dict[str, list[Any]] = {way: [] for way in WAYS}
    order = random.Random(args.seed)
    for _ in range(args.rounds):
        for way in order.sample(WAYS, len(WAYS)):
            lanes[way].append(bench.block(way, args.block))
    bench.choose(SCHEDULED)
    plan = bench.pace.plan
    assert plan is not None
    if dist.get_rank() == 0:
        found = {
            "lanes": lanes,
            "plan": plan.reason,
            "interval": plan.interval,
            "bandwidth": plan.link.bandwidth,
            "startup_ms": 1e3 * plan.link.startup,
            "idle_ms": [[1e3 * span.start, 1e3 * span.length] for span in plan.profile.spans],
            "iteration_ms": 1e3 * plan.profile.seconds,
            "replica_bytes": bench.pace.replica_bytes,
            "warm_up_iterations": warm_up,
        }
        args.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
