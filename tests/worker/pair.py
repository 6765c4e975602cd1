"""Rank RANK of 2, each on a node of its own (two memory directories): for test_commit.py.

argv: mode. Trains a tiny model; "kill": rank 1 kills itself inside the exchange of iteration 4.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import gemini_run

MODE = sys.argv[1]
TOTAL = 8 if MODE == "full" else 6

if MODE == "kill" and os.environ["RANK"] == "1":
    from gemini_run.peers.transport import Exchange

    bodies = Exchange._bodies

    def dying(self, own, wanted, incoming):  # type: ignore[no-untyped-def]
        if own.header.iteration == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        bodies(self, own, wanted, incoming)

    Exchange._bodies = dying  # type: ignore[method-assign]

if MODE == "full" and os.environ["RANK"] == "1":
    from gemini_run.errors import MemoryFull
    from gemini_run.peers.replicas import ReplicaSlots
    from gemini_run.worker.ownslots import OwnSlots

    def short(writable, times):  # type: ignore[no-untyped-def]
        """There is no room for what comes after iteration 2, so many times."""
        left = [times]

        def tried(self, keep, *args):  # type: ignore[no-untyped-def]
            if keep == 2 and left[0]:
                left[0] -= 1
                raise MemoryFull("full", needed_bytes=9, free_bytes=1)
            return writable(self, keep, *args)

        return tried

    OwnSlots.writable = short(OwnSlots.writable, 2)  # type: ignore[method-assign]
    ReplicaSlots.writable = short(ReplicaSlots.writable, 3)  # type: ignore[method-assign]

torch.manual_seed(int(os.environ["RANK"]))
model = nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer)
for _step in ckpt.steps(3 if MODE == "early" and os.environ["RANK"] == "1" else TOTAL):
    optimizer.zero_grad()
    model(torch.randn(4, 300)).square().sum().backward()
    optimizer.step()
ckpt.close()
print("iteration", ckpt.iteration, "problem", ckpt._committer.problem if ckpt._committer else None)
