"""A small GPT that learns to write like Lewis Carroll: plain PyTorch, DDP over gloo, checkpointed every step.

    gemini-run --standalone --nproc-per-node=2 examples/char_lm.py
    torchrun   --standalone --nproc-per-node=2 examples/char_lm.py     # the same script, without recovery

Three lines belong to gemini-run: the import, the Checkpointer, and the loop over ``ckpt.steps(...)``.
The batch of a step depends on the step number and the rank alone, so the data position is the step number.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gemini_run

TEXT = Path(__file__).parent / "data" / "alice.txt"


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.merge(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharGPT(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def write(self, start: torch.Tensor, count: int, generator: torch.Generator) -> list[int]:
        """`count` more characters after `start`, sampled with a generator of their own."""
        tokens = start.clone()
        for _ in range(count):
            logits = self(tokens[None, -self.context :])[0, -1] / 0.8
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen])
        return tokens.tolist()


def batch_at(
    data: torch.Tensor, step: int, rank: int, size: int, context: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of one step on one rank: a function of its arguments, so any step can be repeated."""
    generator = torch.Generator().manual_seed((seed << 40) + (step << 12) + rank)
    starts = torch.randint(len(data) - context - 1, (size,), generator=generator)
    windows = torch.stack([data[s : s + context + 1] for s in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def warm_up_then_cosine(step: int, *, warm_up: int, total: int) -> float:
    """Factor of the learning rate at `step`: linear up, then a cosine down to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, total - warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="training text (UTF-8)")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64, help="characters per sequence")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1865)
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--sample", type=int, default=300, metavar="CHARACTERS", help="0 = no sample")
    parser.add_argument("--save", type=Path, help="write final weights and optimizer state (rank 0)")
    parser.add_argument("--losses", type=Path, help="append one line `unix-time step loss` a step (rank 0)")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # The order of sums inside a kernel depends on the number of threads: fix it, whatever the machine has.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    text = args.text.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    index_of = {character: index for index, character in enumerate(alphabet)}
    data = torch.tensor([index_of[character] for character in text])

    torch.manual_seed(args.seed)  # equal weights on all ranks
    gpt = CharGPT(len(alphabet), args.context, args.width, args.layers, args.heads, args.dropout)
    model = DDP(gpt)
    torch.manual_seed(args.seed + 1 + rank)  # but each rank drops out its own activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step, warm_up=40, total=args.steps)
    )
    if rank == 0:
        count = sum(p.numel() for p in gpt.parameters())
        print(f"{len(text):,} characters, {count:,} parameters, {world} rank(s)", flush=True)

    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
    started, first = time.monotonic(), None
    for step in ckpt.steps(args.steps):
        first = step if first is None else first
        inputs, targets = batch_at(data, step, rank, args.batch, args.context, args.seed)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

        if rank == 0 and (args.losses or (step + 1) % args.print_every == 0 or step + 1 == args.steps):
            value = loss.item()
            if args.losses:
                with args.losses.open("a") as log:
                    log.write(f"{time.time():.6f} {step + 1} {value:.9f}\n")
            if (step + 1) % args.print_every == 0 or step + 1 == args.steps:
                pace = (time.monotonic() - started) / (step + 1 - first)
                print(f"step {step + 1:4d}/{args.steps}  loss {value:.3f}  {pace * 1e3:.0f} ms/step", flush=True)

    if rank == 0 and args.save:
        partial = args.save.with_name(f"{args.save.name}.partial")
        torch.save({"model": gpt.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, args.save)
    if rank == 0 and args.sample:
        gpt.eval()
        start = torch.tensor([index_of[c] for c in "Alice " if c in index_of] or [0])
        written = gpt.write(start, args.sample, torch.Generator().manual_seed(args.seed))
        print("\n--- sample " + "-" * 60)
        print("".join(alphabet[token] for token in written))
        print("-" * 71, flush=True)
    dist.barrier()  # nobody leaves while rank 0 still writes
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
