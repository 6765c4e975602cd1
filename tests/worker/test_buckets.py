"""Three ranks of DDP: the resumed run is bit-identical only if the gradient buckets come back as well."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from gemini_run.wire import ENV_WORKER, MemoryPaths, WorkerContext

TRIO = Path(__file__).with_name("trio.py")
RANKS = 3


def run_trio(memory: MemoryPaths, given: str, total: int, restore: int | None) -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = WorkerContext(
        run_id="test", run_dir=str(memory.root), round=0 if restore is None else 1, node_id="n0", node_rank=0,
        num_nodes=1, memory_dir=str(memory.root), store_host="127.0.0.1", store_port=store.port, replicas=1,
        snapshot_interval=1, durable_iterations=None, durable_seconds=None, restore_iteration=restore,
        restore_source="local",
    )  # fmt: skip
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(RANKS):
            env = dict(
                os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
            )  # fmt: skip
            env[ENV_WORKER] = context.to_json()
            started.append(
                subprocess.Popen(
                    [sys.executable, str(TRIO), given, str(total)],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=120) for process in started]
        assert [p.returncode for p in started] == [0] * RANKS, outputs
        return outputs[0][0].split("HASH ")[1].split()[0]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("given", "at"), [("wrapped", 3), ("bare", 1)])
def test_a_resumed_run_of_three_ranks_is_bit_identical(
    given: str, at: int, memory: MemoryPaths, tmp_path: Path
) -> None:
    other = MemoryPaths(tmp_path / "other")
    for directory in (other.slots, other.beacons):
        directory.mkdir(parents=True)
    want = run_trio(other, given, 6, None)
    run_trio(memory, given, at, None)
    assert run_trio(memory, given, 6, at) == want
