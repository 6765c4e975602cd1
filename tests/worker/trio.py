"""Rank RANK of 3 with DDP: trains 6 iterations, or goes on from iteration argv[1]; prints a hash of the weights."""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gemini_run

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(500, 600), nn.Tanh(), nn.Linear(600, 500), nn.Tanh(), nn.Linear(500, 3))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(100 + dist.get_rank())
given = ddp if sys.argv[1] == "wrapped" else model
ckpt = gemini_run.Checkpointer(model=given, optimizer=optimizer)
total = int(sys.argv[2])
for _ in ckpt.steps(total):
    optimizer.zero_grad()
    ddp(torch.randn(8, 500)).square().mean().backward()
    optimizer.step()
ckpt.close()
if os.environ["RANK"] == "0":
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print("HASH", digest.hexdigest(), flush=True)
dist.destroy_process_group()
