"""A script that has process groups of its own all the time: steps before `init_process_group`, a barrier and an
all_reduce in each step, groups that are made and destroyed, a device mesh, and the default group destroyed and made
again. argv: steps, folder for what each rank saw, file of the second rendezvous."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gemini_run

STEPS, OUT, SECOND = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
EARLY = 5  #: steps without any group


def main() -> None:
    state = {"w": torch.zeros(3)}
    checkpointer = gemini_run.Checkpointer(state=state)
    checkpointer.restore()
    seen: list[object] = []
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for step in range(STEPS):
        if step == EARLY:
            dist.init_process_group("gloo")
            if rank == 1:
                time.sleep(2)  # its group forms at a boundary that the others reached long before
        if step == STEPS // 2:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{SECOND}", rank=rank, world_size=size)
        if step >= EARLY:
            dist.barrier()
            value = torch.full((3,), float(rank + step))
            dist.all_reduce(value)
            state["w"] += value
            if step % 20 == EARLY:
                own = dist.new_group(list(range(size)))
                dist.all_reduce(value, group=own)
                mesh = init_device_mesh("cpu", (size,))
                names = [own.group_name, mesh.get_group().group_name, dist.group.WORLD.group_name]
                seen.append([step, names, value.tolist()])
                dist.destroy_process_group(own)
        checkpointer.step()
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{rank}.json").write_text(json.dumps([seen, state["w"].tolist()]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
