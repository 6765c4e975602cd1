"""What a user meets first when something is wrong: one clear line, the right exit code, and nothing started."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

import pytest
from jobs import events, run_job, started_job, wait_until

from gemini_run.agent.process import is_running
from gemini_run.memory.header import SLOT_VERSION
from gemini_run.testing.nodes import LocalCluster, require_root_namespaces

pytestmark = pytest.mark.cluster

#: argv: megabytes of state, iterations, file of finished iterations
JOB = """
import os, sys, time
import torch
from torch import nn
import gemini_run
width = max(2, int((float(sys.argv[1]) * 1e6 / 4) ** 0.5))
model = nn.Linear(width, width, bias=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpointer = gemini_run.Checkpointer(model=model, optimizer=optimizer)
for step in checkpointer.steps(int(sys.argv[2])):
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    with open(sys.argv[3], "a") as file:
        file.write(f"{os.environ['RANK']} {step}\\n")
    time.sleep(0.02)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A memory directory of the test's own: what failed runs leave goes with it."""
    path = tmp_path / "memory"
    path.mkdir()
    return path


def one_error(stderr: str) -> str:
    """The only line that gemini-run calls an error."""
    lines = [line for line in stderr.splitlines() if line.startswith("gemini-run: error:")]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr, stderr
    return lines[0]


def test_shared_memory_too_small_is_said_before_the_first_step(job: Path, tmp_path: Path) -> None:
    """Case A29; full while a slot is made: tests/memory/test_slots.py."""
    reason = require_root_namespaces()
    if reason:
        pytest.skip(reason)
    steps = tmp_path / "steps"
    # 12 MB of parameters are 36 MB of state: two slots of it do not fit into 48 MB.
    with LocalCluster(nodes=1, kind="shm", shm_bytes=48 << 20, workers_per_node=1, echo=False) as cluster:
        cluster.start(job, "12", "5", str(steps))
        assert cluster.wait(120) == [1]
        error = one_error(cluster.nodes[0].output())
        assert "rank 0" in error and "/dev/shm" in error
        assert "needed" in error and "free" in error and "--shm-size" in error
        assert not steps.exists()
        [failed] = cluster.events("run_failed")
        assert "/dev/shm" in failed["cause"]
        assert len(cluster.events("worker_failed")) == 1, "no restart can mend it"


def test_a_durable_tier_that_cannot_be_written_is_said_before_anything_starts(
    home: Path, job: Path, tmp_path: Path
) -> None:
    plain_file = tmp_path / "file"
    plain_file.write_text("")
    done = run_job(home, f"--durable={plain_file}/checkpoints", job, 1, 5, tmp_path / "steps")
    assert done.returncode == 1
    assert f"{plain_file}/checkpoints" in one_error(done.stderr)
    assert not (tmp_path / "steps").exists() and not home.exists()


def test_more_replicas_than_nodes(home: Path, job: Path, tmp_path: Path) -> None:
    done = run_job(home, "--nnodes=2", "--rdzv-id=x", "--replicas=3", job, 1, 5, tmp_path / "steps")
    assert done.returncode == 2
    error = one_error(done.stderr)
    assert "--replicas" in error and "3" in error and "2" in error


def test_a_script_that_is_not_there(home: Path) -> None:
    done = run_job(home, "nowhere/train.py")
    assert done.returncode == 2 and "nowhere/train.py: no such file in" in one_error(done.stderr)
    done = run_job(home, "stats")
    assert done.returncode == 2 and "did you mean gemini-run status?" in one_error(done.stderr)
    done = run_job(home, "--no-python", "no-such-program")
    assert done.returncode == 2 and "no-such-program: no such program on PATH" in one_error(done.stderr)
    assert not home.exists()


def test_a_script_that_exits_alike_twice_is_not_tried_ten_times(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text("import sys; sys.exit(3)")
    done = run_job(home, "--no-zygote", script)
    assert done.returncode == 1
    assert "the same exit code at the same iteration twice in a row" in done.stderr
    assert len(events(home, "worker_failed")) == 2
    assert "starting again from scratch: no checkpoint was taken" in done.stderr


def kill_all(home: Path, memory: Path, job: Path, steps: Path, *options: object) -> None:
    """A run "r" that is killed, agent and workers, after a few iterations; its memory stays."""
    with started_job(home, f"--memory-dir={memory}", "--rdzv-id=r", *options, job, 0.1, 100000, steps) as run:
        wait_until(lambda: steps.exists() and steps.read_text().count("\n") > 12, "iterations are finished")
        os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not _running(home), "its workers ended with it")


def _running(home: Path) -> bool:
    forked = {int(str(event["pid"])) for event in events(home, "zygote_forked")}
    return any(is_running(pid) for pid in forked)


def test_another_number_of_workers_goes_on_from_what_is_there(
    home: Path, memory: Path, job: Path, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    kill_all(home, memory, job, steps, "--nproc-per-node=2")
    reached = 1 + min(max(int(s) for r, s in _lines(steps) if r == rank) for rank in "01")
    done = run_job(
        home, f"--memory-dir={memory}", "--rdzv-id=r", "--nproc-per-node=1", job, 0.1, reached + 5, tmp_path / "again"
    )
    assert done.returncode == 0, done.stderr
    assert reached - 1 <= min(int(step) for _, step in _lines(tmp_path / "again")), "it went on where it was"
    assert "taken with 2 ranks and redistributed to 1" in done.stderr


def test_a_slot_of_a_newer_format_is_not_thrown_away(home: Path, memory: Path, job: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    kill_all(home, memory, job, steps)
    slots = [path for path in memory.rglob("slots/*") if path.is_file()]
    assert slots
    for slot in slots:
        with slot.open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", SLOT_VERSION + 1))
    before = {slot: slot.read_bytes() for slot in slots}
    done = run_job(home, f"--memory-dir={memory}", "--rdzv-id=r", job, 0.1, 5, tmp_path / "other")
    assert done.returncode == 1
    assert f"slot of format version {SLOT_VERSION + 1}" in one_error(done.stderr)
    assert before == {slot: slot.read_bytes() for slot in slots}
    assert not (tmp_path / "other").exists()


def test_no_checkpoint_where_one_is_required(home: Path, memory: Path, job: Path, tmp_path: Path) -> None:
    done = run_job(home, f"--memory-dir={memory}", "--require-checkpoint", job, 0.1, 5, tmp_path / "steps")
    assert done.returncode == 1
    error = one_error(done.stderr)
    assert "no checkpoint found" in error and "--require-checkpoint" in error
    assert not (tmp_path / "steps").exists()


def _lines(path: Path) -> list[tuple[str, str]]:
    return [(rank, step) for rank, step in (line.split() for line in path.read_text().splitlines())]
