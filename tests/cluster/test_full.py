"""Host memory that fills up while the job runs: training goes on, says what it lacks, and checkpoints again later."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Reference, Run

from gemini_run.testing.nodes import Node

pytestmark = pytest.mark.cluster


def fill(node: Node) -> Path:
    """Leave not one page of the node's host memory."""
    path = node.memory_base / "somebody-elses"
    stats = os.statvfs(node.memory_base)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stats.f_bavail * stats.f_frsize)
    assert os.statvfs(node.memory_base).f_bavail == 0
    return path


def test_memory_fills_up_and_is_freed_again(run: Callable[..., Run], reference: Reference, tmp_path: Path) -> None:
    """Case A29: a durable upload needs a third slot, for which there is no room; then a worker dies, all the same."""
    job = run(2, 1, kind="shm")
    job.start(
        "--pause=0.15", "--own-mb=1", options=[f"--durable={tmp_path / 'durable'}", "--durable-interval=10it"]
    )  # fmt: skip
    job.reach(4)
    node = job.cluster.nodes[1]
    taken = fill(node)
    [full] = job.until_event("memory_full", 1)
    assert full["free_bytes"] == 0 and full["needed_bytes"] > 1e6
    assert 10 <= full["newest"] < full["iteration"] <= 14
    job.reach(full["iteration"] + 3)
    assert "warning: rank" in job.said() and "training goes on" in job.said() and "--shm-size" in job.said()
    assert not job.cluster.events("worker_failed") and not job.cluster.events("snapshots_stopped")

    # No page is free for anything: neither for notes nor for beacons of the round after this one.
    pid = job.cluster.kill_worker(full["rank"])
    assert pid is not None
    restored = job.until_event("restored", 2)
    assert {event["source"] for event in restored} == {"local"}
    assert {event["iteration"] for event in restored} == {restored[0]["iteration"]}
    assert restored[0]["iteration"] >= full["newest"]
    job.reach(restored[0]["iteration"] + 3)

    taken.unlink()
    job.until_event("persisted", 2)
    job.ends_like(reference("--own-mb=1"))
