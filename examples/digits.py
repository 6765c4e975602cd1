"""scikit-learn's handwritten digits with a DataLoader and a DistributedSampler, resumed in mid-epoch.

    gemini-run --standalone --nproc-per-node=2 examples/digits.py
    torchrun   --standalone --nproc-per-node=2 examples/digits.py      # the same script, without recovery

The Checkpointer is given the loader: after a restart `for ... in loader` goes on behind the last batch that was
trained on. `epoch` follows from the step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gemini_run


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: every fifth sample is for the test."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    test = torch.arange(len(x)) % 5 == 0
    return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    model.eval()
    correct = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return correct


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, help="end after so many steps (default: all of the epochs)")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader worker processes")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--save", type=Path, help="write final weights and optimizer state (rank 0)")
    parser.add_argument("--losses", type=Path, help="append one line `unix-time step loss` a step (rank 0)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # the order of sums depends on the number of threads: fix it
    torch.use_deterministic_algorithms(True)

    train, test = make_data()
    sampler: DistributedSampler = DistributedSampler(train, world, rank, shuffle=True, seed=args.seed)
    loader: DataLoader = DataLoader(train, args.batch, sampler=sampler, drop_last=True, num_workers=args.workers)
    per_epoch = len(loader)
    total = args.steps if args.steps is not None else args.epochs * per_epoch

    torch.manual_seed(args.seed)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    model = DDP(net)
    torch.manual_seed(args.seed + 1 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)  # per epoch

    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step = ckpt.restore()
    while step < total:
        epoch = step // per_epoch
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
            if step % per_epoch == 0:
                scheduler.step()

            if rank == 0 and args.losses:
                with args.losses.open("a") as log:
                    log.write(f"{time.time():.6f} {step} {loss.item():.9f}\n")
            if rank == 0 and (step % per_epoch == 0 or step == total):
                print(
                    f"epoch {epoch + 1:2d}  step {step:4d}/{total}  loss {loss.item():.3f}"
                    f"  test accuracy {accuracy(net, test):.3f}",
                    flush=True,
                )
            ckpt.step()  # the end of the iteration: after optimizer and scheduler, and after the evaluation
            if step == total:
                break

    if rank == 0 and args.save:
        partial = args.save.with_name(f"{args.save.name}.partial")
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, args.save)
    dist.barrier()  # nobody leaves while rank 0 still writes
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
