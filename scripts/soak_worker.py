"""One rank of the soak: trains at full speed, a checkpoint at every iteration. Started by soak.py."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from bench_contenders import MODELS, TIMEOUT, Training

import gemini_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--state-mb", type=float, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    training = Training(args.model, args.state_mb, batch=8)
    checkpointer = gemini_run.Checkpointer(model=training.model, optimizer=training.optimizer)
    for _ in checkpointer.steps(args.iterations):
        training.iteration()
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
