"""Nodes that go silent without dying, and come back; spares; jobs that shrink and grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import Reference, Run, ask

from gemini_run.testing.compare import count_tensors, differences
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


def test_a_job_shrinks_and_grows_with_its_state(run: Make) -> None:
    """Case A48: three nodes, two, three again; every round goes on from what the one before had reached, to the bit."""
    job = run(3, 1, world=3)
    each = job.cluster.scratch / "each"
    job.start("--pause=0.25", f"--save-each={each}", options=["--nnodes=2:3", "--shrink-after=0.5", "--replicas=3"])
    for number, node in enumerate(job.cluster.nodes):
        job.until(lambda node=node: node.memory() is not None, f"node {number} has memory")  # type: ignore[misc]
    job.reach(8)
    nodes = by_id(job)
    first = members(job)
    lost = next(name for name in first if nodes[name].index != 0)
    nodes[lost].kill()
    job.until_event("restored", 2)
    done = max(job.finished().values())
    job.until(lambda: sorted(job.finished().values())[1] >= done + 3, "two train on")
    assert ask(job.cluster, "status", job.cluster.run_id, "--json").json["run"]["replicas"]["degraded"]
    job.cluster.start_node(nodes[lost].index)
    job.until(lambda: len(members(job)) == 3, "it has grown again")
    job.until_event("restored", 5)
    job.until_event("replicas_complete", 2)
    replicas = ask(job.cluster, "status", job.cluster.run_id, "--json").json["run"]["replicas"]
    assert (replicas["degraded"], replicas["asked"], replicas["wanted"]) == (False, 3, 3)
    job.until(lambda: not any(node.running for node in job.cluster.nodes), "its end")
    assert job.cluster.wait(60) == [0, 0, 0], job.cluster.tail()

    started = {e["round"]: e for e in job.cluster.events("round_started")}
    assert [started[number]["world_size"] for number in sorted(started)] == [3, 2, 3]
    stayed = [name for name in first if name != lost]
    assert all(name in started[number]["nodes"] for name in stayed for number in started)
    for number, (before, now) in ((1, (3, 2)), (2, (2, 3))):
        of_round = [e for e in job.cluster.events("restored") if e["round"] == number]
        assert len(of_round) == now and {e["from_world_size"] for e in of_round} == {before}
        [iteration] = {e["iteration"] for e in of_round}
        assert started[number]["lost_iterations"] <= 1
        for rank in range(now):
            mine = torch.load(each / f"begun{number}.{rank}", weights_only=True)
            theirs = torch.load(each / f"{iteration}.{rank % before}", weights_only=True)
            assert mine.pop("iteration") == iteration and count_tensors(theirs) > 15
            assert not differences(mine, theirs)
    assert [(e["round"], e["wanted"]) for e in job.cluster.events("replicas_degraded")] == [(1, 2), (2, 3)]
    assert job.cluster.events("fell_back") == []
    assert "taken with 3 ranks and redistributed to 2" in job.said()
    assert not any(node.memory() for node in job.cluster.nodes)


def test_a_rack_is_lost(run: Make, reference: Reference) -> None:
    """Both nodes of it at once: their shards have their copies in the other rack, whatever ranks the nodes have."""
    job = run(4, 1)
    for node in job.cluster.nodes:
        node._environment["GEMINI_FAILURE_DOMAIN"] = f"rack {node.index // 2}"  # node 0 holds the rendezvous store
    job.start("--pause=0.1")
    job.reach(10)
    rack = job.cluster.nodes[2:]
    for node in rack:
        node.kill()
    for node in rack:
        job.cluster.start_node(node.index)
    job.ends_like(reference(world=4))
    of_round = [e for e in job.cluster.events("restored") if e["round"] == 1]
    assert sorted(e["source"] for e in of_round) == ["local", "local", "peer", "peer"]
    assert job.cluster.events("fell_back") == [] and job.cluster.events("placement_shares_domain") == []
