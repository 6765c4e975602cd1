"""Loss of the node that holds the rendezvous store: named with plain c10d, survived with etcd."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from runs import JOB, PATIENCE, PAUSE, STEPS, Reference, Run, ask

from gemini_run.agent.etcd_member import Place, _is_free_here
from gemini_run.testing.nodes import free_port, read_events

pytestmark = pytest.mark.cluster
Make = Callable[..., Run]


def test_c10d_dies_with_its_host_and_says_what_outlives_it(run: Make) -> None:
    job = run(2, 1)
    job.start()
    job.reach(15)
    job.cluster.nodes[0].kill()
    assert job.cluster.nodes[1].wait(PATIENCE) == 1
    said = job.cluster.nodes[1].output()
    errors = [line for line in said.splitlines() if line.startswith("gemini-run: error:")]
    assert len(errors) == 1 and "the job cannot re-form" in errors[0], said
    assert "--rdzv-backend gemini" in errors[0] and "same --rdzv-id" in errors[0]
    found = ask(job.cluster, "recover", "--json").json
    # The snapshot after iteration 14 begins when the one after 13 is complete on both nodes.
    assert found["source"] == "memory" and found["iteration"] >= 13
    assert sorted(rank["tier"] for rank in found["ranks"]) == ["local memory", "peer memory"]


def test_nodes_that_run_etcd_themselves_lose_any_of_them(run: Make, reference: Reference) -> None:
    job = run(3, 1)
    endpoint = ",".join(f"127.0.0.1:{port}" for port in pairs_of_ports(3))
    job.start(options=["--rdzv-backend=gemini", f"--rdzv-endpoint={endpoint}"])
    job.reach(12)
    job.cluster.nodes[0].kill()  # with plain c10d: the one that must not
    job.cluster.start_node(0)
    job.ends_like(reference(world=3))
    assert len(job.cluster.events("restored")) == 3
    assert len(job.cluster.events("fetch_done")) == 1
    assert job.repeated() <= 2


def pairs_of_ports(count: int) -> list[int]:
    """Ports of which the next is free, too."""
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        if _is_free_here(Place("127.0.0.1", port)) and not {port - 1, port, port + 1} & set(found):
            found.append(port)
    return found


def test_the_classic_command_of_two_nodes_without_a_run_id(run: Make, reference: Reference) -> None:
    """--nnodes, --node-rank, --master-addr and --master-port, as in many a launch script; a worker is killed."""
    job = run(2, 1)
    port = free_port()
    command = [f"--steps={STEPS}", f"--pause={PAUSE}", f"--out={job.out}", f"--lines={job.lines}"]
    for node in job.cluster.nodes:
        options = ["--nnodes=2", f"--node-rank={node.index}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        node.start([*options, str(JOB), *command])
    job.reach(10)
    [home] = (job.cluster.home / "runs").iterdir()
    assert home.name.startswith(f"127.0.0.1-{port}-"), "both are of one run"
    state = [node.output() for node in job.cluster.nodes]
    assert all(f"no --rdzv-id: run {home.name}" in text for text in state)
    [victim] = {
        e["pid"] for e in read_events(home / "events.jsonl") if e["event"] == "zygote_forked" and e["rank"] == 1
    }
    os.kill(victim, signal.SIGKILL)
    job.ends_like(reference())
    restored = [e for e in read_events(home / "events.jsonl") if e["event"] == "restored"]
    assert len(restored) == 2 and {e["source"] for e in restored} == {"local"}
