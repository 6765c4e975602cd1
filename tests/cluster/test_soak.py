"""Memory and file descriptors over many snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from runs import PATIENCE, Run

from gemini_run.testing.nodes import LocalCluster
from gemini_run.testing.usage import NodeUse, grown

pytestmark = pytest.mark.cluster


def test_nothing_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A28: 300 snapshots with replicas and, now and then, an upload. `scripts/soak.py` is the long version."""
    monkeypatch.setattr(runs, "STEPS", 100_000)
    samples = []
    with LocalCluster(nodes=2, echo=False) as cluster:
        job = Run(cluster, 2)
        job.start("--own-mb=4", "--pause=0", options=[f"--durable={tmp_path / 'durable'}", "--durable-interval=20it"])
        for iteration in (50, 200, 350):
            cluster.wait_for(lambda at=iteration: cluster.iteration() >= at, PATIENCE, f"iteration {iteration}")
            job.until_event("persisted", len(samples) + 1)
            samples.append([NodeUse.of(node) for node in cluster.nodes])
        assert all(use.state_bytes > 4e6 for uses in samples for use in uses)
        assert not grown(samples, slots=5)
