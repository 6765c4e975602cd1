"""One rank of the recovery bench: a small DDP job that says when each optimizer step was finished.

The same script for both launchers; `--save-every` alone decides whether it checkpoints with torch.save (rank 0, every
n iterations, resumed at the start) or with gemini_run.Checkpointer. Started by bench_recovery.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_run

WIDTH = 512
HIDDEN_LAYERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, required=True, help="sets how long an iteration takes")
    parser.add_argument("--lines", type=Path, required=True, help="where the STEP lines go")
    parser.add_argument("--save-every", type=int, help="torch.save every so many iterations, to --checkpoint")
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    lines = os.open(args.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(lines, f"GROUP {rank} 0 {time.time():.6f} {os.getpid()}\n".encode())
    torch.manual_seed(0)
    layers = [layer for _ in range(HIDDEN_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(args.batch, WIDTH)

    start, boundary = (
        with_torch_save(model, optimizer, args.checkpoint, args.save_every)
        if args.save_every
        else with_gemini_run(model, optimizer)
    )
    for iteration in itertools.count(start + 1):  # until it is killed for good
        ddp(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # One write: lines of both ranks never mix. Finished is finished: whether it is also safe shows at the kill.
        os.write(lines, f"STEP {rank} {iteration} {time.time():.6f} {os.getpid()}\n".encode())
        boundary(iteration)


def with_gemini_run(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, Callable[[int], None]]:
    checkpointer = gemini_run.Checkpointer(model=model, optimizer=optimizer)
    return checkpointer.restore(), lambda iteration: checkpointer.step()


def with_torch_save(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, every: int
) -> tuple[int, Callable[[int], None]]:
    start = 0
    if path.exists():
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        start = found["iteration"]

    def boundary(iteration: int) -> None:
        if iteration % every == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)

    return start, boundary


if __name__ == "__main__":
    main()
