"""Failures that come while what was lost before is being made good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from runs import Reference, Run

pytestmark = pytest.mark.cluster
Make = Callable[..., Run]


def test_a_node_is_lost_right_after_a_round_that_went_on_from_an_iteration_without_replicas(
    run: Make, reference: Reference
) -> None:
    job = run(2, 1)
    # Iteration 20 is complete on each rank's own node alone when rank 1 dies. The next round goes on from there, and
    # may not give up iteration 19, the newest one with replicas, before 20 has some.
    job.start("--die=exchange:20", "--hang=21")

    def snapshots() -> list[int]:
        return [b.snapshot for node in job.cluster.nodes for b in node.beacons().values()]

    job.until(lambda: snapshots() == [21, 21], "iteration 21, on its way to the peers")
    job.cluster.nodes[1].kill()
    job.cluster.start_node(1)
    job.ends_like(reference())
    assert job.cluster.events("fell_back") == []
    by_round = {n: {e["iteration"] for e in job.cluster.events("restored") if e["round"] == n} for n in (1, 2)}
    assert by_round == {1: {20}, 2: {20}}
