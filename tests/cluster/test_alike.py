"""What ranks hold alike: those of one node share the copying, and nodes keep the copies of who holds the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from runs import STEPS, Reference, Run

from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.testing.nodes import Node

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


def test_a_whole_shard_group_is_lost(run: Callable[..., Run], reference: Reference) -> None:
    """HSDP over four nodes: those with the same shard keep each other's copies and send nearly nothing, so that both
    nodes of one sharded replica may be lost at once."""
    job = run(4, 1)
    job.start("--hsdp", "--pause=0.1")
    job.reach(8)
    ranks = {int(notes["node_rank"]): node for node in job.cluster.nodes if (notes := node_notes(node))}
    half = next(pair for pair in ((0, 1), (2, 3)) if all(ranks[rank].index for rank in pair))  # 0 has the store
    for rank, node in ranks.items():
        memory = node.memory()
        assert memory is not None
        kept = [i for i in scan_slots(memory) if i.usable and i.header and i.header.owner != rank]
        assert {i.header.owner for i in kept if i.header} == {(rank + 2) % 4}
        for info in kept:
            slot = Slot(info.path)
            header = slot.header()
            lenders = slot.lenders(header)
            sent = sum(item.length for item, by in zip(slot.manifest(header).items, lenders, strict=True) if by < 0)
            assert sent < header.payload_length / 4, "what the holder has itself is not sent"
    for rank in half:
        ranks[rank].kill()
    for rank in half:
        job.cluster.start_node(ranks[rank].index)
    job.ends_like(reference("--hsdp", world=4))
    restored = job.cluster.events("restored")  # on a machine under pressure a silent node may cost a round of its own
    after = next(event["round"] for event in restored if event["source"] == "peer")
    assert sorted(e["source"] for e in restored if e["round"] == after) == ["local", "local", "peer", "peer"]
    assert job.cluster.events("fell_back") == []
    assert job.repeated() <= 3 * len({event["round"] for event in restored})


def node_notes(node: Node) -> dict[str, Any]:
    memory = node.memory()
    assert memory is not None
    notes: dict[str, Any] = json.loads(memory.node_json.read_text())["notes"]
    return notes
