"""Three ranks of DDP: the resumed run is bit-identical only if the gradient buckets come back as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from gemini_run.testing.processes import free_port
from gemini_run.wire import MemoryPaths, WorkerContext

TRIO = Path(__file__).with_name("trio.py")


def phase(
    memory: MemoryPaths, given: str, total: int, restore: int | None, window: int, store: dist.TCPStore
) -> dict[str, object]:
    context = WorkerContext(
        run_id="test", run_dir=str(memory.root), round=0 if restore is None else 1, node_id="n0", node_rank=0,
        num_nodes=1, memory_dir=str(memory.root), store_host="127.0.0.1", store_port=store.port, replicas=1,
        snapshot_interval=1, durable_iterations=None, durable_seconds=None, restore_iteration=restore,
        restore_source="local",
    )  # fmt: skip
    return {"given": given, "total": total, "window": window, "port": free_port(), "context": context.to_json()}


def test_resumed_runs_of_three_ranks_are_bit_identical(tmp_path: Path) -> None:
    """Also case A35: within a window of no_sync(), in which every rank's gradients are its own."""
    stores = []  # one for each round, as an agent gives them

    def ask(name: str, given: str, total: int, restore: int | None = None, *, window: int = 1) -> dict[str, object]:
        memory = MemoryPaths(tmp_path / name)
        for directory in (memory.slots, memory.beacons):
            directory.mkdir(parents=True, exist_ok=True)
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return phase(memory, given, total, restore, window, stores[-1])

    phases = [
        ask("reference", "bare", 6),
        ask("wrapped", "wrapped", 3), ask("wrapped", "wrapped", 6, 3),
        ask("bare", "bare", 1), ask("bare", "bare", 6, 1),
        ask("accumulated", "bare", 8, window=4),
        ask("in a window", "bare", 7, window=4), ask("in a window", "bare", 8, 7, window=4),
    ]  # fmt: skip
    trio = subprocess.run(
        [sys.executable, str(TRIO), json.dumps(phases)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert trio.returncode == 0, trio.stderr
    reference, _, wrapped, _, bare, accumulated, _, in_a_window = [
        line.split()[1] for line in trio.stdout.splitlines() if line.startswith("HASH")
    ]
    assert wrapped == reference
    assert bare == reference
    assert in_a_window == accumulated
