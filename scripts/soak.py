"""Whether memory and file descriptors stay flat while every iteration is checkpointed.

    python scripts/soak.py [--model ddp|fsdp2] [--state-mb 30] [--iterations 300] [--durable-every 20]

Two nodes with a worker each keep each other's replicas, and an iteration goes to a durable directory now and then.
Exit code 1 if anything grew after the first tenth of the run, or a node's memory was ever more than its slots may
take: two for each copy of a shard, one more of the worker's own where the durable tier takes some, and 5 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gemini_run.testing.nodes import LocalCluster
from gemini_run.testing.usage import NodeUse, grown

WORKER = Path(__file__).with_name("soak_worker.py")
SAMPLES = 10
#: What is freed goes back to the system at once: the allocator's pools grow for hundreds of iterations without a leak.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PATIENCE = 120.0  #: seconds for a tenth of the run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("ddp", "fsdp2"), default="fsdp2")
    parser.add_argument("--state-mb", type=float, default=30.0, help="of each rank")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--durable-every", type=int, default=20, metavar="ITERATIONS", help="0: no durable tier")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    every = max(1, args.iterations // SAMPLES)
    found: list[tuple[int, list[NodeUse]]] = []
    with tempfile.TemporaryDirectory() as folder, LocalCluster(nodes=2, environment=ALLOCATOR, echo=False) as cluster:
        options = [f"--durable={folder}", f"--durable-interval={args.durable_every}it"] if args.durable_every else []
        words = [f"--model={args.model}", f"--state-mb={args.state_mb}", f"--iterations={args.iterations}"]
        cluster.start(WORKER, *words, options=options)
        for target in range(every, args.iterations, every):
            cluster.wait_for(lambda at=target: cluster.iteration() >= at, PATIENCE, f"iteration {target}")
            found.append((cluster.iteration(), [NodeUse.of(node) for node in cluster.nodes]))
        codes = cluster.wait(PATIENCE)
        if any(codes):
            console.print(cluster.tail(), markup=False)
            return 1
    show(console, found)
    problems = grown([uses for _, uses in found], slots=5 if args.durable_every else 4)
    for problem in problems:
        console.print(problem, style="red", markup=False)
    return 1 if problems else 0


def show(console: Console, found: list[tuple[int, list[NodeUse]]]) -> None:
    table = Table(title="MB resident of its own (and of slots), open files; node memory in states")
    for column in ("iteration", "node", "agent", "files", "worker", "files", "slots", "memory"):
        table.add_column(column, justify="right")
    for iteration, uses in found:
        for node, use in enumerate(uses):
            worker = use.workers[0]
            table.add_row(
                str(iteration), str(node), f"{use.agent.private_bytes / 1e6:.0f}", str(use.agent.descriptors),
                f"{worker.private_bytes / 1e6:.0f} ({worker.shared_bytes / 1e6:.0f})", str(worker.descriptors),
                str(use.slots), f"{use.memory_bytes / use.state_bytes:.2f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
