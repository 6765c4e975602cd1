"""Three ranks with DDP, forked from one interpreter so that torch is imported once.

argv: a JSON list of phases {"given": "wrapped" | "bare", "window": micro-batches of an optimizer step, each an
iteration, "total": iterations, "port": of the process group, "context": the worker context}. Prints a hash of rank 0's
weights after each phase.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from forks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_run
from gemini_run.wire import ENV_WORKER

RANKS = 3


def train(rank: int, phase: dict[str, Any]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(phase["port"]),
    )  # fmt: skip
    os.environ[ENV_WORKER] = phase["context"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(500, 600), nn.Tanh(), nn.Linear(600, 500), nn.Tanh(), nn.Linear(500, 3))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    ckpt = gemini_run.Checkpointer(model=ddp if phase["given"] == "wrapped" else model, optimizer=optimizer)
    window = phase["window"]
    for step in ckpt.steps(phase["total"]):
        last = step % window == window - 1
        if step % window == 0:
            optimizer.zero_grad()
        with contextlib.nullcontext() if last else ddp.no_sync():
            ddp(torch.randn(8, 500)).square().mean().backward()
        if last:
            optimizer.step()
    ckpt.close()
    if rank == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        print("HASH", digest.hexdigest(), flush=True)
    dist.destroy_process_group()


def main() -> None:
    for phase in json.loads(sys.argv[1]):
        codes = run_ranks(RANKS, functools.partial(train, phase=phase))
        if any(codes):
            sys.exit(f"phase {phase['given']}/{phase['total']}: exit codes {codes}")


main()
