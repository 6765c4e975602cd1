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
TOTAL = 6

if MODE == "kill" and os.environ["RANK"] == "1":
    from gemini_run.peers.transport import Exchange

    bodies = Exchange._bodies

    def dying(self, slot, header, placed):  # type: ignore[no-untyped-def]
        if header.iteration == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        bodies(self, slot, header, placed)

    Exchange._bodies = dying  # type: ignore[method-assign]

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
