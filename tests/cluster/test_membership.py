"""Nodes that go silent without dying, and come back; spares; jobs that shrink and grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runs import Reference, Run, ask

from gemini_run.testing.nodes import Node

pytestmark = pytest.mark.cluster
Make = Callable[..., Run]


def by_id(job: Run) -> dict[str, Node]:
    """Node id -> node, of those that have memory now."""
    return {paths.root.name: node for node in job.cluster.nodes if (paths := node.memory())}


def members(job: Run) -> list[str]:
    """Node ids of the newest round, by node rank."""
    newest: dict[str, Any] = max(job.cluster.events("round_started"), key=lambda event: event["round"])
    return list(newest["nodes"])


def shown(job: Run) -> dict[str, str]:
    """Node id -> state, as `gemini-run status` says it."""
    run = ask(job.cluster, "status", job.cluster.run_id, "--json").json["run"]
    return {entry["node"]: entry["state"] for entry in run["nodes"]}


@pytest.mark.parametrize("how", ["frozen", "cut off"])
def test_a_node_that_comes_back_after_its_spare_took_over_is_a_spare(how: str, run: Make, reference: Reference) -> None:
    """It can neither write a replica nor join with its old generation: it starts as a newcomer, and is of use."""
    job = run(3, 1, kind="net", world=2)
    job.start("--pause=0.15", options=["--nnodes=2"])
    job.reach(10)
    nodes = by_id(job)
    first = members(job)
    zombie_id = next(name for name in first if nodes[name].index != 0)  # node 0 holds the rendezvous store
    zombie, spare_id = nodes[zombie_id], next(name for name in nodes if name not in first)
    if how == "frozen":
        zombie.freeze()
    else:
        zombie.cut_link()
    job.until_event("restored", 2)
    assert set(members(job)) == set(first) - {zombie_id} | {spare_id}
    assert members(job).index(spare_id) == first.index(zombie_id), "the newcomer takes the lost rank"
    began = job.finished()
    job.until(lambda: min(job.finished().values()) >= max(began.values()) + 3, "training without it")
    if how == "frozen":
        zombie.thaw()
    else:
        zombie.restore_link()
    job.until(lambda: any(e["node"] == zombie_id for e in job.cluster.events("spare_waiting")), "it waits as a spare")
    assert [e["node"] for e in job.cluster.events("node_returned")] == [zombie_id]
    assert max(e["round"] for e in job.cluster.events("round_started")) == 1, "nobody was disturbed"

    states = {zombie_id: "spare", **{name: "running" for name in members(job)}}
    job.until(lambda: shown(job) == states, "status tells the spare from the members")
    assert "spare" in ask(job.cluster, "status", job.cluster.run_id).out

    nodes[spare_id].kill()
    job.until_event("restored", 4)
    assert set(members(job)) == set(first)
    assert job.cluster.nodes[0].wait(90) == 0 and zombie.wait(90) == 0
    job.equals(reference())
    for number in (1, 2):
        of_round = [e for e in job.cluster.events("restored") if e["round"] == number]
        assert sorted(e["source"] for e in of_round) == ["local", "peer"]
    assert job.cluster.events("fell_back") == []
