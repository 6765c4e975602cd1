"""A small training job whose every kind of state matters: weights, moments, schedule, dropout, all generators.

Runs under torchrun as well. Each finished iteration is a line "rank iteration" in --lines; at the end each rank saves
its whole state to --out. --die PLACE:ITERATION lets rank 1 kill itself once, in the first round:
"copy" in the middle of copying its snapshot, "exchange" in the middle of sending it to the peer. --hang ITERATION lets
it stop for good in the middle of sending that one, in the second round. --own-mb gives each rank something that no
other holds: so much goes over the network with every replica.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gemini_run
from gemini_run.testing.odd import Odd, raw

WIDTH = 48
#: DDP's reducer ends gloo's threads as it goes, with the GIL held, and one of these may just be waiting for the GIL to
#: let go of the last allreduce (seen in torch 2.13, under load): it must outlive main() by a moment.
KEPT: list[object] = []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lines", type=Path)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that an iteration takes longer")
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--hsdp", action="store_true", help="two replicas, each sharded over one half of the ranks")
    parser.add_argument(
        "--save-each", type=Path, help="folder for this rank's state as it begins a round, and after every iteration"
    )
    parser.add_argument("--diverge", type=int, help="iteration in which rank 1 alone changes one weight")
    parser.add_argument("--die", default="")
    parser.add_argument("--hang", type=int)
    parser.add_argument("--own-mb", type=float, default=0.0)
    parser.add_argument("--odd", action="store_true", help="each rank also trains tensors of all dtypes and layouts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    np.random.seed(rank)
    random.seed(rank)
    if args.die and rank == 1 and os.environ.get("GEMINI_RESTART_GENERATION") == "0":
        place, _, iteration = args.die.partition(":")
        die_in(place, int(iteration))
    if args.hang and rank == 1 and os.environ.get("GEMINI_RESTART_GENERATION") == "1":
        hang_in(args.hang)

    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    if args.fsdp or args.hsdp:
        shape = (2, dist.get_world_size() // 2) if args.hsdp else (dist.get_world_size(),)
        with torch.random.fork_rng(enabled=args.hsdp):
            if args.hsdp:
                torch.manual_seed(0)  # unlike DDP it does not see to it that replicas begin alike
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.GELU(), nn.Linear(WIDTH, WIDTH + 1))
        names = ("replicate", "shard")[-len(shape) :]
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        wrapped: nn.Module = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    KEPT.append(wrapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    log: dict[str, list[float]] = {"losses": []}
    own = {"values": torch.full((int(args.own_mb * 1e6 / 8),), rank, dtype=torch.float64)}
    more: dict[str, Any] = {"own": own} if args.own_mb else {}
    if args.odd:
        odd, conv = Odd(), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        odd_optimizer = torch.optim.Adam([*odd.parameters(), *conv.parameters()], lr=1e-2)
        more |= {"odd": odd, "conv": conv, "odd_optimizer": odd_optimizer}
    checkpointer = gemini_run.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, log=log, **more)
    if args.save_each:
        begun = {"iteration": checkpointer.restore(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(begun, args.save_each / f"begun{os.environ.get('GEMINI_RESTART_GENERATION')}.{rank}")
    for step in checkpointer.steps(args.steps):
        noise = float(np.random.standard_normal()) + random.random()
        loss = wrapped(torch.randn(8, WIDTH) + noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step + 1 == args.diverge and rank == 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1.0
        if args.odd:
            odd_optimizer.zero_grad()
            (odd(torch.randn(2, 4)).square().mean() + conv(odd.last.new_ones(1, 3, 4, 4)).square().mean()).backward()
            odd_optimizer.step()
        log["losses"].append(loss.item())
        own["values"] += 1
        if args.save_each:
            save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                args.save_each / f"{step + 1}.{rank}",
            )
        if args.lines:
            with args.lines.open("a") as file:
                file.write(f"{rank} {step}\n")
        time.sleep(args.pause)

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    last = {"log": log, "rng": torch.get_rng_state(), "draws": [random.random(), float(np.random.standard_normal())]}
    if args.odd:
        moments = {f"{i}.{k}": v for i, s in odd_optimizer.state_dict()["state"].items() for k, v in s.items()}
        named = [*odd.named_buffers(), *odd.named_parameters(prefix="odd"), *conv.named_parameters(), *moments.items()]
        state["odd"] = {name: raw(tensor) for name, tensor in named}
    save({**state, **last}, args.out / f"{rank}.pt")
    save(own, args.out / f"own{rank}.pt")
    dist.destroy_process_group()


def save(state: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    torch.save(local(state), beside)
    os.replace(beside, path)


def local(state: Any) -> Any:
    """`state` with this rank's part of every sharded tensor."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state.to_local() if hasattr(state, "to_local") else state


def die_in(place: str, iteration: int) -> None:
    """Arrange this process's end."""
    from gemini_run.peers.transport import Exchange
    from gemini_run.worker import capture
    from gemini_run.worker.capture import Snapshotter

    copy, snapshot, bodies = capture._copy_and_check, Snapshotter.snapshot, Exchange._bodies
    now: list[int] = []

    def counted(self: Any, number: int, **kwargs: Any) -> Any:
        now[:] = [number]
        return snapshot(self, number, **kwargs)

    def half(sources: Any, base: int, lenders: Any) -> list[int]:
        if place == "copy" and now == [iteration]:
            some = len(sources) // 2
            copy(sources[:some], base, lenders[:some])
            os.kill(os.getpid(), signal.SIGKILL)
        return copy(sources, base, lenders)

    def cut(self: Any, own: Any, wanted: Any, incoming: Any) -> None:
        if place == "exchange" and own.header.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        bodies(self, own, wanted, incoming)

    Snapshotter.snapshot, Exchange._bodies = counted, cut  # type: ignore[method-assign]
    capture._copy_and_check = half


def hang_in(iteration: int) -> None:
    from gemini_run.peers.transport import Exchange

    bodies = Exchange._bodies

    def stuck(self: Any, own: Any, wanted: Any, incoming: Any) -> None:
        if own.header.iteration == iteration:
            time.sleep(3600)
        bodies(self, own, wanted, incoming)

    Exchange._bodies = stuck  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
