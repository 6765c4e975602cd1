"""Replicas over a network that cannot hold one every iteration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runs import STEPS, Reference, Run, ask

pytestmark = pytest.mark.cluster


def test_a_slow_network_makes_the_interval_longer_and_the_state_stays_exact(
    run: Callable[..., Run], reference: Reference
) -> None:
    job = run(2, 1, kind="net", rate="100mbit")
    job.start("--own-mb=2.5")  # 0.2 s on the wire, several iterations
    lasting = lambda: [e for e in job.cluster.events("interval_changed") if not e["passing"]]  # noqa: E731
    job.until(lasting, "an interval that the network can hold")
    every = lasting()[0]["interval"]
    assert every > 1
    [snapshots] = [ask(job.cluster, "status", job.cluster.run_id, "--json").json["run"]["snapshots"]]
    assert snapshots["asked"] == 1 and snapshots["every"] > 1
    job.until(lambda: f"snapshots every {every} iterations from now on: " in job.said(), "the reason")
    job.cluster.kill_worker(1)
    restored = job.until_event("restored", 2)
    assert len({event["iteration"] for event in restored}) == 1
    job.ends_like(reference())
    for rank in range(2):
        own = torch.load(job.out / f"own{rank}.pt", weights_only=True)["values"]
        assert torch.equal(own, torch.full_like(own, rank + STEPS))
