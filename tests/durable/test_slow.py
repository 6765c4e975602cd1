"""S3 is slow: at a job's end the last upload is waited for, or leaves nothing that looks whole; workers may die too."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faulty_s3 import FaultyS3

from gemini_run.agent.process import is_running
from gemini_run.durable.checkpoint import newest_committed
from gemini_run.durable.s3 import S3Tier
from gemini_run.memory.segment import scan_slots
from gemini_run.testing.nodes import LocalCluster, gemini_run_program

pytestmark = pytest.mark.cluster

PATIENCE = 90.0
LOCATION = "s3://stopped/p"
JOB = """
import sys, time
import torch
import gemini_run
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for step in gemini_run.Checkpointer(model=model, optimizer=optimizer).steps(int(sys.argv[1])):
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""


class Gate:
    """Holds up what is written to S3, once closed."""

    def __init__(self, server: FaultyS3) -> None:
        self.closed = False
        self.reached, self.opened = threading.Event(), threading.Event()
        server.fault = self._pass

    def _pass(self, method: str, path: str) -> str | None:
        if self.closed and method in ("PUT", "POST"):
            self.reached.set()
            self.opened.wait(PATIENCE)
        return None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    server = FaultyS3()
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    tier = S3Tier.at(LOCATION)
    tier._client.create_bucket(Bucket="stopped")
    gate = Gate(server)
    yield gate
    gate.opened.set()
    tier.delete(tier.list())
    server.stop()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    return script


def parameters_after(iterations: int) -> dict[str, torch.Tensor]:
    """The script's, computed here."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(iterations):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    return model.state_dict()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The model of the newest checkpoint in S3, by the way a user would get it."""
    command = [*gemini_run_program(), "recover", LOCATION, "--to", str(folder / "out.pt"), "--format", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    state: dict[str, torch.Tensor] = torch.load(folder / "out.pt", weights_only=True)["model"]
    return state


@pytest.mark.parametrize("signals", [1, 2], ids=["waited for", "given up"])
def test_the_last_upload_is_whole_or_nothing(signals: int, gate: Gate, script: Path) -> None:
    """Case A25, of a job that is told to end."""
    options = [f"--durable={LOCATION}", "--durable-interval=100000it", "--shutdown-timeout=20"]
    with LocalCluster(nodes=1, workers_per_node=2, echo=False) as cluster:
        [node] = cluster.nodes
        cluster.start(script, "100000", options=options)
        # A finished iteration may still be without its snapshot: the one before has it.
        cluster.wait_for(lambda: cluster.iteration() >= 6, PATIENCE, "6 iterations")
        workers = [node.worker_pid(rank) for rank in (0, 1)]
        gate.closed = True
        os.kill(node.pid, signal.SIGTERM)
        assert gate.reached.wait(PATIENCE), cluster.tail()
        assert not any(is_running(pid) for pid in workers if pid), "first the workers end"
        assert node.running, "it waits for the upload"
        if signals == 2:
            os.kill(node.pid, signal.SIGTERM)
        else:
            gate.opened.set()
        assert cluster.wait(PATIENCE) == [1]
        gate.opened.set()
        newest = newest_committed(S3Tier.at(LOCATION))
        stored = [event["iteration"] for event in cluster.events("persisted")]
        assert [newest] == stored if signals == 1 else (newest, stored) == (None, [])
        assert newest is None or newest >= 5
        given_up = [event["iteration"] for event in cluster.events("persist_abandoned")]
        assert len(given_up) == signals - 1
        assert ("did not reach the durable tier" in node.output()) == bool(given_up)


@pytest.mark.parametrize("bound", [60, 2], ids=["within the bound", "beyond it"])
def test_a_script_ends_by_itself_and_its_last_iteration_is_stored(bound: int, gate: Gate, script: Path) -> None:
    """Case A25: the exit waits for S3, for so long as was asked for, and says so if that was not enough."""
    total = 40
    options = [f"--durable={LOCATION}", "--durable-interval=100000it", f"--durable-timeout={bound}"]
    with LocalCluster(nodes=1, workers_per_node=2, echo=False) as cluster:
        [node] = cluster.nodes
        cluster.start(script, str(total), options=options)
        cluster.wait_for(lambda: cluster.iteration() >= 2, PATIENCE, "2 iterations")
        gate.closed = True
        assert gate.reached.wait(PATIENCE), cluster.tail()
        if bound == 60:
            time.sleep(5)
            assert node.running and not cluster.events("persisted", "persist_abandoned")
            gate.opened.set()
        assert cluster.wait(PATIENCE) == [0]
        gate.opened.set()
        assert newest_committed(S3Tier.at(LOCATION)) == (total if bound == 60 else None)
        said = node.output()
        if bound == 60:
            assert f"newest durable checkpoint: iteration {total} in {LOCATION}" in said
            assert equal(stored(script.parent), parameters_after(total))
        else:
            assert f"iteration {total} did not reach the durable tier {LOCATION}: not uploaded within 2 s" in said
            assert [event["iteration"] for event in cluster.events("persist_abandoned")] == [total]


def test_workers_die_and_go_on_while_their_last_checkpoint_is_still_being_read(gate: Gate, script: Path) -> None:
    """Case A24: the next commit comes within seconds, and what is being stored is what it was."""
    options = [f"--durable={LOCATION}", "--durable-interval=20it"]
    with LocalCluster(nodes=1, workers_per_node=2, echo=False) as cluster:
        [node] = cluster.nodes
        cluster.start(script, "100000", options=options)
        cluster.wait_for(lambda: cluster.iteration() >= 2, PATIENCE, "2 iterations")
        gate.closed = True
        assert gate.reached.wait(PATIENCE), cluster.tail()
        memory = node.memory()
        assert memory is not None
        [held] = {info.header.iteration for info in scan_slots(memory) if info.usable and info.header.hold}
        for kill in range(4):
            cluster.kill_worker(kill % 2)
            cluster.wait_for(
                lambda kill=kill: len(cluster.events("restored")) >= 2 * (kill + 1), PATIENCE, "both have restored"
            )
            newest = max(event["iteration"] for event in cluster.events("restored"))
            assert newest >= held
            cluster.wait_for(
                lambda newest=newest: min((b.committed for b in node.beacons().values()), default=0) >= newest + 5,
                10, "new commits",
            )  # fmt: skip
            assert {i.header.iteration for i in scan_slots(memory) if i.usable and i.header.hold} == {held}
        gate.opened.set()
        cluster.wait_for(lambda: cluster.events("persisted"), PATIENCE, "the upload is through")
        assert cluster.events("persisted")[0]["iteration"] == held
        assert [e["signal"] for e in cluster.events("worker_failed") if not e["consequence"]] == ["SIGKILL"] * 4
        os.kill(node.pid, signal.SIGTERM)
        assert cluster.wait(PATIENCE) == [1]
        newest_stored = newest_committed(S3Tier.at(LOCATION))
        assert newest_stored is not None and newest_stored > held
        assert equal(stored(script.parent), parameters_after(newest_stored))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
