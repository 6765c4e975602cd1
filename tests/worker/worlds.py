"""Jobs of some number of ranks, forked from one interpreter so that torch is imported once.

Reads jobs as JSON lines from stdin: {"kind", "ranks", "total": iterations, "port", "contexts": a worker context for
each node, "out": folder}. Every rank saves what it holds, whole, as it begins ("before.RANK") and ends
("after.RANK"). Prints the exit codes of each job.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gemini_run
from gemini_run.wire import ENV_WORKER


class Net(nn.Module):
    """Layers whose rows 2 and 3 ranks cannot share evenly; of the last one, which has two names, some have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 1)
        self.tied = self.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.norm(self.up(x))))
        return result


def wrap(kind: str, model: Net, ranks: int) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "hsdp":
        return sharded(model, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))
    mesh = init_device_mesh("cpu", (ranks,))
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model.norm = nn.Identity()  # type: ignore[assignment]
        return parallelize_module(model, mesh, plan)
    return sharded(model, mesh)


def sharded(model: Net, mesh: DeviceMesh) -> nn.Module:
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    result: nn.Module = fully_shard(model, mesh=mesh)
    return result


def train(rank: int, job: dict[str, Any]) -> None:
    per_node = job["ranks"] // len(job["contexts"])
    node, local_rank = divmod(rank, per_node)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(job["ranks"]), LOCAL_WORLD_SIZE=str(per_node),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]),
    )  # fmt: skip
    os.environ[ENV_WORKER] = job["contexts"][node]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    wrapped = wrap(job["kind"], model, job["ranks"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    log: dict[str, Any] = {"losses": []}
    ckpt = gemini_run.Checkpointer(model=wrapped, optimizer=optimizer, log=log)
    started = ckpt.restore()
    save(job, f"before.{rank}", model, optimizer, log, started)
    for _ in ckpt.steps(job["total"]):
        optimizer.zero_grad()
        torch.manual_seed(len(log["losses"]))  # the same data in every world
        loss = wrapped(torch.randn(8, 6)).square().mean()
        loss.backward()
        optimizer.step()
        log["losses"].append(loss.item())
    ckpt.close()
    save(job, f"after.{rank}", model, optimizer, log, ckpt.iteration)
    dist.destroy_process_group()


def save(job: dict[str, Any], name: str, model: nn.Module, optimizer: Any, log: Any, iteration: int) -> None:
    state = {
        "iteration": iteration,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "log": log,
        "torch": torch.get_rng_state(),
        "python": str(random.getstate()),
    }
    torch.save(whole(state), Path(job["out"]) / name)


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run_ranks(job["ranks"], functools.partial(train, job=job))), flush=True)


main()
