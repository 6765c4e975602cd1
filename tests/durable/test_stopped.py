"""SIGTERM to the launcher while S3 is slow: the last upload is waited for, or leaves nothing that looks whole."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_s3 import FaultyS3

from gemini_run.agent.process import is_running
from gemini_run.durable.checkpoint import newest_committed
from gemini_run.durable.s3 import S3Tier
from gemini_run.testing.nodes import LocalCluster

pytestmark = pytest.mark.cluster

PATIENCE = 90.0
JOB = """
import sys, time
import torch
import gemini_run
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for step in gemini_run.Checkpointer(model=model, optimizer=optimizer).steps(100000):
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
    tier = S3Tier.at("s3://stopped/p")
    tier._client.create_bucket(Bucket="stopped")
    gate = Gate(server)
    yield gate
    gate.opened.set()
    tier.delete(tier.list())
    server.stop()


@pytest.mark.parametrize("signals", [1, 2], ids=["waited for", "given up"])
def test_the_last_upload_is_whole_or_nothing(signals: int, gate: Gate, tmp_path: Path) -> None:
    """Case A25."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    options = ["--durable=s3://stopped/p", "--durable-interval=100000it", "--shutdown-timeout=20"]
    with LocalCluster(nodes=1, workers_per_node=2, echo=False) as cluster:
        [node] = cluster.nodes
        cluster.start(script, options=options)
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
        newest = newest_committed(S3Tier.at("s3://stopped/p"))
        stored = [event["iteration"] for event in cluster.events("persisted")]
        assert [newest] == stored if signals == 1 else (newest, stored) == (None, [])
        assert newest is None or newest >= 5
        given_up = [event["iteration"] for event in cluster.events("persist_abandoned")]
        assert len(given_up) == signals - 1
        assert ("did not reach the durable tier" in node.output()) == bool(given_up)
