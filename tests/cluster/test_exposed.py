"""The last copies: failures that come while the one before is being made good, and damage to one copy after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from runs import Reference, Run

from gemini_run.memory.segment import NodeMemory, SlotInfo, scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.testing.nodes import Node

pytestmark = pytest.mark.cluster
Make = Callable[..., Run]


def test_a_node_is_lost_right_after_a_round_that_went_on_from_an_iteration_without_replicas(
    run: Make, reference: Reference
) -> None:
    job = run(2, 1)
    make_first(job.cluster.nodes[1], job)
    # Iteration 20 is complete on each rank's own node alone when rank 1 dies. The next round goes on from there, and
    # may not give up iteration 19, the newest one with replicas, before 20 has some.
    job.start("--die=exchange:20", "--hang=21")

    def snapshots() -> list[int]:
        return [b.snapshot for node in job.cluster.nodes for b in node.beacons().values()]

    job.until(lambda: snapshots() == [21, 21], "iteration 21, on its way to the peers")
    lost = job.cluster.node_of_rank(0)
    assert lost.index == 1, "the first rank's node, and not the one with the rendezvous store"
    lost.kill()
    job.cluster.start_node(1)
    job.ends_like(reference())
    assert job.cluster.events("fell_back") == []
    by_round = {n: {e["iteration"] for e in job.cluster.events("restored") if e["round"] == n} for n in (1, 2)}
    assert by_round == {1: {20}, 2: {20}}
    ranks = {e["node"]: e["node_rank"] for e in job.cluster.events("round_started") if e["round"] == 2}
    assert ranks == {job.cluster.events("fetch_done")[0]["node"]: 0, job.cluster.events("fetch_done")[0]["from"]: 1}


def make_first(node: Node, job: Run) -> None:
    """Give `node` an identity that comes before the others': it will be node rank 0."""
    others = [NodeMemory.claim(job.cluster.run_id, other.memory_base) for other in job.cluster.nodes if other != node]
    while True:
        mine = NodeMemory.claim(job.cluster.run_id, node.memory_base)
        found = mine.node_id < min(memory.node_id for memory in others)
        mine.release(remove=not found)
        if found:
            break
    for memory in others:
        memory.release(remove=False)


def test_every_copy_of_the_newest_iteration_is_damaged_then_every_copy_of_all(
    run: Make, reference: Reference, tmp_path: Path
) -> None:
    job = run(2, 1)
    options = [f"--durable={tmp_path / 'durable'}", "--durable-interval=10it"]
    # Slow: an upload may take its time, and the job is not to be over before it is stopped.
    job.start("--pause=0.25", options=options)
    job.until_event("persisted", 1)
    job.reach(17)
    while len(whole := complete_on_all(slots := stop(job))) < 2:  # killed as one of them was being overwritten
        resume(job)
        job.reach(max(whole) + 5)
    before = len(job.cluster.events("restored"))
    flip(info for info in slots if info.header and info.header.iteration > whole[-2])
    resume(job)
    job.until_event("restored", before + 2)
    assert {e["iteration"] for e in job.cluster.events("restored")[before:]} == {whole[-2]}
    assert job.cluster.events("fell_back") == []

    job.reach(whole[-1] + 3)
    flip(stop(job))
    furthest = max(beacon.iteration for node in job.cluster.nodes for beacon in node.beacons().values())
    job.start("--pause=0", options=options)
    job.ends_like(reference())
    restored = job.cluster.events("restored")[before + 2 :]
    assert {e["source"] for e in restored} == {"durable"} and {e["iteration"] % 10 for e in restored} == {0}
    for fell in job.cluster.events("fell_back"):
        assert fell["source"] == "durable"
        assert fell["lost_iterations"] == furthest - fell["to"], "told truly, though each round found the next bad"
    assert "every rank goes back to durable iteration" in job.said()
    for node in job.cluster.nodes:
        assert "fails its checksum" in node.output()


def stop(job: Run) -> list[SlotInfo]:
    """Kill all, leave the memory; its complete slots."""
    for node in job.cluster.nodes:
        node.kill(keep_memory=True)
    memories = [memory for node in job.cluster.nodes if (memory := node.memory())]
    return [info for memory in memories for info in scan_slots(memory) if info.usable]


def complete_on_all(slots: Iterable[SlotInfo]) -> list[int]:
    """Iterations of which every rank has a copy somewhere, the newest last."""
    owners: dict[int, set[int]] = {}
    for info in slots:
        if info.header:
            owners.setdefault(info.header.iteration, set()).add(info.header.owner)
    return sorted(iteration for iteration, found in owners.items() if found == {0, 1})


def resume(job: Run) -> None:
    for node in job.cluster.nodes:
        job.cluster.start_node(node.index)


def flip(slots: Iterable[SlotInfo]) -> None:
    """One bit of each, in the middle of its tensors: nothing but a checksum can tell. One that was killed before it
    got its checksums is torn instead."""
    for info in slots:
        assert info.header is not None
        if not info.header.sealed:
            slot = Slot(info.path, writable=True)
            slot.begin()
            slot.close()
            continue
        with info.path.open("r+b") as file:
            file.seek(info.header.payload_offset + info.header.payload_length // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
