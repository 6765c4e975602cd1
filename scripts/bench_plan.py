"""How long it takes to decide who keeps whose copies, for every rank of a large job, and what the odds then are.

    python scripts/bench_plan.py [--nodes 4096] [--workers 8] [--repeat 5] [--json FILE]

Each row: placement, then for every global rank its checkpoint process group, whom it sends to and whom it receives
from; then the odds for up to 8 lost nodes. Times are the best of `--repeat`; memory is the peak of Python's objects.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gemini_run.plan.placement import Placement, placement
from gemini_run.plan.probability import recovery_probability

LOSSES = 8


def cases(nodes: int) -> dict[str, Callable[[], Placement]]:
    """What is planned: label -> how."""
    racks = [f"rack{node // 32}" for node in range(nodes)]
    pipelines = [f"pipeline{node % max(1, nodes // 8)}" for node in range(nodes)]
    shards = [f"shard{node % max(1, nodes // 2)}" for node in range(nodes)]
    return {
        "m=2": lambda: placement(nodes, 2),
        "m=3, mixed": lambda: placement(nodes, 3),
        "m=2, racks of 32": lambda: placement(nodes, 2, domains=racks),
        "m=3, racks of 32": lambda: placement(nodes, 3, domains=racks),
        "m=4, racks of 32": lambda: placement(nodes, 4, domains=racks),
        "m=2, racks and pipelines of 8": lambda: placement(nodes, 2, domains=racks, parallel=pipelines),
        "m=3, racks, each shard on 2 nodes": lambda: placement(nodes, 3, domains=racks, alike=shards),
    }


def every_rank(plan: Placement, workers: int) -> list[tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]]]:
    """By global rank: its process group (placement group, local rank), ranks it sends to, ranks it receives from."""
    index = {node: i for i, group in enumerate(plan.groups) for node in group}
    return [
        (
            (index[node], local),
            tuple(to * workers + local for to in plan.sends_to(node)),
            tuple(giver * workers + local for giver in plan.receives_from(node)),
        )
        for node in range(plan.num_nodes)
        for local in range(workers)
    ]


def measure(how: Callable[[], Placement], workers: int, repeat: int) -> dict[str, Any]:
    plans, odds = [], []
    for _ in range(repeat):
        start = time.perf_counter()
        plan = how()
        ranks = every_rank(plan, workers)
        plans.append(time.perf_counter() - start)
        start = time.perf_counter()
        recovery_probability(plan, min(LOSSES, plan.num_nodes))
        odds.append(time.perf_counter() - start)
    tracemalloc.start()
    kept = (how(), every_rank(how(), workers))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "plan_s": min(plans), "odds_s": min(odds), "peak_bytes": peak, "ranks": len(ranks), "ring": len(kept[0].ring),
        "unavoided": list(kept[0].unavoided),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=8, help="of each node")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    options = parser.parse_args()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in (f"{options.nodes} nodes x {options.workers} ranks", "PLAN", "ODDS", "MEMORY", "RING", "NOT AVOIDED"):
        table.add_column(column, justify="left" if column[0].isdigit() else "right")
    measured = {}
    for what, how in cases(options.nodes).items():
        found = measured[what] = measure(how, options.workers, options.repeat)
        table.add_row(
            what, f"{found['plan_s'] * 1e3:.0f} ms", f"{found['odds_s'] * 1e3:.1f} ms",
            f"{found['peak_bytes'] / 2**20:.0f} MiB", str(found["ring"]), str(len(found["unavoided"])),
        )  # fmt: skip
    Console(highlight=False, emoji=False).print(table)
    if options.json:
        options.json.write_text(json.dumps({"version": 1, "measured": measured}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
