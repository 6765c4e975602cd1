"""Group commit and replicas between two real processes on two "nodes" (memory directories)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from gemini_run.journal import read_events
from gemini_run.memory.beacons import read_beacons
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.settle import settle_file
from gemini_run.memory.slots import Slot
from gemini_run.wire import ENV_WORKER, CommitRecord, MemoryPaths, RunPaths, WorkerContext
from gemini_run.worker.commit import Schedule

PAIR = Path(__file__).with_name("pair.py")


def context(tmp_path: Path, node: int, port: int, **changes: object) -> WorkerContext:
    paths = MemoryPaths(tmp_path / f"n{node}")
    for directory in (paths.slots, paths.beacons):
        directory.mkdir(parents=True, exist_ok=True)
    fields: dict[str, object] = {
        "run_id": "test", "run_dir": str(tmp_path), "round": 0, "node_id": f"n{node}", "node_rank": node,
        "num_nodes": 2, "memory_dir": str(paths.root), "store_host": "127.0.0.1", "store_port": port,
        "replicas": 2, "snapshot_interval": 1, "durable_iterations": None, "durable_seconds": None,
        "restore_iteration": None, "restore_source": "none",
    }  # fmt: skip
    return WorkerContext(**{**fields, **changes})  # type: ignore[arg-type]


def run_pair(tmp_path: Path, mode: str, **changes: object) -> list[subprocess.CompletedProcess[str]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in (0, 1):
            env = dict(
                os.environ, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", OMP_NUM_THREADS="1"
            )
            env[ENV_WORKER] = context(tmp_path, rank, store.port, **changes).to_json()
            command = [sys.executable, str(PAIR), mode]
            started.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=100) for process in started]
        return [
            subprocess.CompletedProcess(p.args, p.returncode, *out) for p, out in zip(started, outputs, strict=True)
        ]
    finally:
        for process in started:
            process.kill()
            process.wait()


def complete(tmp_path: Path, node: int) -> dict[int, set[int]]:
    """Owner -> iterations complete on that node, every checksum verified."""
    found: dict[int, set[int]] = {}
    for info in scan_slots(MemoryPaths(tmp_path / f"n{node}")):
        if info.usable and info.header:
            Slot(info.path).verify(borrowing=True)
            assert info.header.sealed or info.header.owner == node
            found.setdefault(info.header.owner, set()).add(info.header.iteration)
    return found


def test_every_shard_is_in_both_nodes_memory_and_equal(tmp_path: Path) -> None:
    for result in run_pair(tmp_path, "plain"):
        assert result.returncode == 0, result.stderr
        assert "iteration 6 problem None" in result.stdout
    for node in (0, 1):
        assert complete(tmp_path, node) == {0: {5, 6}, 1: {5, 6}}
    for owner in (0, 1):
        bodies = []
        for node in (0, 1):
            for info in scan_slots(MemoryPaths(tmp_path / f"n{node}")):
                if info.header and (info.header.owner, info.header.iteration) == (owner, 6):
                    settle_file(info.path)
                    bodies.append(bytes(Slot(info.path).payload(info.header)))
        assert len(bodies) == 2 and bodies[0] == bodies[1]
    assert read_beacons(MemoryPaths(tmp_path / "n0"))[0].committed == 6


def test_a_peer_killed_in_the_middle_leaves_the_previous_iteration_whole(tmp_path: Path) -> None:
    survivor, dead = run_pair(tmp_path, "kill")
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode == 0, survivor.stderr
    assert "takes no more snapshots" in survivor.stderr
    here = complete(tmp_path, 0)
    assert 3 in here[0] and here[1] == {3}, "the replica of iteration 4 was cut off, that of 3 must stay"
    assert 4 not in complete(tmp_path, 1).get(0, set())


def test_a_rank_that_ends_early_does_not_hang_the_other(tmp_path: Path) -> None:
    late, early = run_pair(tmp_path, "early", replicas=1)
    assert early.returncode == 0 and late.returncode == 0, late.stderr
    assert "before iteration 4" in late.stderr
    assert "iteration 6" in late.stdout


def test_no_room_on_one_rank_voids_iterations_on_all_and_no_more(tmp_path: Path) -> None:
    """Case A29. Rank 1 has no room for its own 3 and 4, nor for replicas of 3, 4 and 5; 3 should have been stored."""
    other, short = run_pair(tmp_path, "full", durable_iterations=3)
    for result in (other, short):
        assert result.returncode == 0, result.stderr
        assert "iteration 8 problem None" in result.stdout
    assert short.stderr.count("no room for the snapshot of iteration 3; training goes on") == 1
    assert "the newest checkpoint stays iteration 2" in short.stderr
    assert "there is room again; iteration 6 is checkpointed" in short.stderr
    assert "no room" not in other.stderr
    events = [event for event in read_events(RunPaths(tmp_path).events) if event["event"].startswith("memory_")]
    assert [(e["rank"], e["event"], e["iteration"]) for e in events] == [(1, "memory_full", 3), (1, "memory_free", 6)]
    for node in (0, 1):
        assert {owner: max(held) for owner, held in complete(tmp_path, node).items()} == {0: 8, 1: 8}
        assert read_beacons(MemoryPaths(tmp_path / f"n{node}"))[0].committed == 8
    held = [i.header.iteration for node in (0, 1) for i in scan_slots(MemoryPaths(tmp_path / f"n{node}"))
            if i.header and i.header.hold]  # fmt: skip
    assert held == [7, 7], "the first that was whole; nothing void stays held"


@pytest.mark.parametrize(("interval", "every", "held"), [(1, 3, [3, 6, 9]), (2, 3, [4, 6, 10]), (5, 5, [5, 10])])
def test_durable_by_count(tmp_path: Path, interval: int, every: int, held: list[int]) -> None:
    schedule = Schedule(context(tmp_path, 0, 1, snapshot_interval=interval, durable_iterations=every), 0, 0.0)
    record, found = schedule.first, []
    while record.next_iteration <= 10:
        if record.next_durable:
            found.append(record.next_iteration)
        record = schedule.after(record.next_iteration, 0.0)
    assert found == held


def test_what_is_due_waits_while_the_durable_tier_is_busy(tmp_path: Path) -> None:
    busy = True
    by_count = Schedule(context(tmp_path, 0, 1, durable_iterations=3), 0, 0.0, lambda: busy)
    assert [by_count.after(k, 0.0).next_durable for k in range(1, 9)] == [False] * 8
    busy = False
    assert [by_count.after(k, 0.0).next_durable for k in (9, 10, 11, 12)] == [True, False, True, False]
    busy = True
    by_time = Schedule(context(tmp_path, 0, 1, durable_seconds=10.0), 0, 100.0, lambda: busy)
    assert not by_time.after(1, 115.0).next_durable
    busy = False
    assert [by_time.after(k, now).next_durable for k, now in ((2, 116.0), (3, 125.0), (4, 126.0))] == [
        True, False, True,
    ]  # fmt: skip


def test_the_time_counts_over_all_rounds(tmp_path: Path) -> None:
    schedule = Schedule(context(tmp_path, 0, 1, durable_seconds=10.0, durable_at=95.0), 7, now=100.0)
    assert [schedule.after(k, now).next_durable for k, now in ((7, 100.0), (8, 105.0), (9, 106.0))] == [
        False, True, False,
    ]  # fmt: skip


def test_durable_by_time(tmp_path: Path) -> None:
    schedule = Schedule(context(tmp_path, 0, 1, durable_seconds=10.0), 7, now=100.0)
    assert schedule.first == CommitRecord(7, 8, False)
    assert [schedule.after(k, now).next_durable for k, now in ((8, 109.0), (9, 110.0), (10, 111.0), (11, 120.0))] == [
        False, True, False, True,
    ]  # fmt: skip
