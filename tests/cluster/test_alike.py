"""Ranks of one node hold their state alike and share the copying; then one of them goes its own way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from runs import STEPS, Reference, Run

from gemini_run.memory.segment import scan_slots

pytestmark = pytest.mark.cluster


def test_a_rank_that_parts_from_its_neighbour_keeps_its_own_state(
    run: Callable[..., Run], reference: Reference
) -> None:
    job = run(2, 2)
    job.start("--diverge=30")
    job.reach(10)
    job.cluster.kill_worker(1)
    job.until_event("restored", 4)
    memories = [memory for node in job.cluster.nodes if (memory := node.memory())]
    borrowed: set[int] = set()

    def all_borrow() -> bool:
        infos = [info for memory in memories for info in scan_slots(memory)]
        borrowed.update(i.header.owner for i in infos if i.usable and i.header and i.header.borrowed)
        return len(borrowed) == 4

    job.until(all_borrow, "copies shared on both nodes, replicas included")

    job.until_event("replicas_disagree", 2)
    job.cluster.kill_worker(0)  # the iteration at which they parted may be without a copy: the one before is there
    job.until_event("restored", 8)
    job.ends_like(reference("--diverge=30", world=4))
    found = [event for event in job.cluster.events("replicas_disagree") if event["iteration"] == 30]
    assert {tuple(event["tensors"]) for event in found} == {("model.0.weight",)}
    assert {event["void"] for event in found} == {False, True}, "who copied it has its own, who borrowed it has none"
    assert "held 'model.0.weight' alike and differ there since iteration 30" in job.said()
    assert job.cluster.events("fell_back") == []
    assert job.repeated() <= 5 < STEPS
