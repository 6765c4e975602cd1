"""One rank of the restore bench: trains three iterations and waits to be killed; started again, it restores and says
how long that took, and how long the same bytes take to be copied. Started by bench_restore.py."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bench_contenders import BYTES_PER_PARAMETER, HIDDEN_LAYERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_run

COPIES = 3


def copy_seconds(num_bytes: int) -> tuple[float, float]:
    """Of one memmove from shared memory to the process's own, the best of COPIES: into memory that it has used before,
    and into memory that is new, as an optimizer's state is."""
    shared, own = mmap.mmap(-1, num_bytes, flags=mmap.MAP_SHARED), torch.ones(num_bytes, dtype=torch.uint8)
    source = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    ctypes.memset(source, 1, num_bytes)
    used, new = [], []
    for _ in range(COPIES):
        dist.barrier()  # all ranks at once, as they restore
        started = time.perf_counter()
        ctypes.memmove(own.data_ptr(), source, num_bytes)
        used.append(time.perf_counter() - started)
    del own
    for _ in range(COPIES):
        dist.barrier()
        started = time.perf_counter()
        fresh = torch.empty(num_bytes, dtype=torch.uint8)
        ctypes.memmove(fresh.data_ptr(), source, num_bytes)
        new.append(time.perf_counter() - started)
        del fresh
    return min(used), min(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    width = round(math.sqrt(args.state_mb * 1e6 / BYTES_PER_PARAMETER / HIDDEN_LAYERS))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(HIDDEN_LAYERS)))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    checkpointer = gemini_run.Checkpointer(model=model, optimizer=optimizer)
    dist.barrier()
    started = time.perf_counter()
    start = checkpointer.restore()
    seconds = time.perf_counter() - started
    if start == 0:
        for _ in range(3):
            ddp(torch.randn(4, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
        checkpointer._committer.wait()  # type: ignore[union-attr]
        (args.out / f"ready{rank}").touch()
        time.sleep(600)
    num_bytes = sum(
        t.numel() * t.element_size()
        for t in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()))
    )
    used, new = copy_seconds(num_bytes)
    found = {"seconds": seconds, "copy_seconds": used, "new_copy_seconds": new, "bytes": num_bytes}
    (args.out / f"restored{start}.{rank}.{os.getpid()}.json").write_text(json.dumps(found))
    dist.barrier()
    (args.out / f"ready{rank}").touch()
    time.sleep(600)


if __name__ == "__main__":
    main()
