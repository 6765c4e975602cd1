"""SIGTERM to a part of a job: to one worker, or to one node's agent. Nothing hangs, nothing finished is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from runs import Reference, Run

from gemini_run.agent.process import is_running

pytestmark = pytest.mark.cluster

Make = Callable[..., Run]


def finished(job: Run) -> int:
    """Iterations that every rank has finished."""
    return min(job.finished().values())


def test_one_worker_is_told_to_end_while_the_other_is_behind(run: Make, reference: Reference) -> None:
    """All ranks stop at one iteration; the same command goes on from it."""
    job = run(1, 2)
    node = job.cluster.nodes[0]
    job.start(options=["--max-restarts=0", "--shutdown-timeout=2"])
    job.reach(15)
    behind, told = node.worker_pid(1), node.worker_pid(0)
    assert behind is not None and told is not None
    os.kill(behind, signal.SIGSTOP)  # rank 0 now waits in a collective, an iteration ahead
    os.kill(told, signal.SIGTERM)
    job.until(lambda: not is_running(told), "rank 0 has ended")
    assert job.cluster.wait(90) == [1]
    assert not node.processes(), "a stopped worker ends too"
    [failure] = job.cluster.events("worker_failed")
    assert (failure["rank"], failure["signal"]) == (0, "SIGTERM")
    done = finished(job)
    job.start()
    job.ends_like(reference())
    [restored] = {event["iteration"] for event in job.cluster.events("restored")}
    assert done - 1 <= restored <= done + 1, "the newest that both ranks had finished"


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
def test_an_agent_is_told_to_end_and_started_again(late: bool, run: Make, reference: Reference) -> None:
    """The rendezvous stays open, the node gets its place and the state back, and no restart is spent."""
    job = run(2, 1)
    job.start(options=["--max-restarts=0"])
    job.reach(15)
    node = job.cluster.nodes[1]
    left = job.cluster.nodes[0].worker_pid(0)
    os.kill(node.pid, signal.SIGTERM)
    assert node.wait(90) == 1
    if late:
        job.until(lambda: left is not None and not is_running(left), "the other node waits for it")
    job.start(options=["--max-restarts=0"], only=1)
    job.ends_like(reference())
    assert [event["signal"] for event in job.cluster.events("node_stopped")] == ["SIGTERM"]
    restored = job.cluster.events("restored")
    assert len(restored) == 2 and {event["source"] for event in restored} <= {"local", "peer"}
    assert len({event["iteration"] for event in restored}) == 1 and restored[0]["iteration"] >= 14
    assert sorted(event["round"] for event in job.cluster.events("round_started")) == [0, 0, 1, 1]
    first, second = (event for event in job.cluster.events("round_started") if event["node_rank"] == 0)
    assert first["nodes"] == second["nodes"], "ranks are sticky"
