"""A round of another world size: the old ranks' slots are checked where they lie, and the workers told where that is.

The workers of the new world read from them what they need (`worker.reshard`). Until these have committed an iteration
of their own, the old slots are all there is: nothing writes over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini_run.agent.runtime import PeerNode
from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.reserve import write_json
from gemini_run.memory.segment import NodeMemory, SlotInfo
from gemini_run.memory.settle import settle_file
from gemini_run.memory.slots import Slot
from gemini_run.plan.recovery import RecoveryPlan
from gemini_run.wire import Reshard, ShardPlace


def held_by(plan: RecoveryPlan, node_rank: int) -> list[int]:
    """Old ranks whose slots the plan counts on at this node."""
    return [owner for owner, nodes in plan.copies if node_rank in nodes]


def check_copy(memory: NodeMemory, plan: RecoveryPlan, owner: int) -> None:
    """Make the slot of an old rank whole, and check every byte of it: peers will be told that it is good.

    Raises: ReplicaCorrupt.
    """
    info = _slot(memory, plan, owner)
    if info is None:
        raise ReplicaCorrupt(f"the slot of rank {owner} is gone from {memory.paths.slots}")
    settle_file(info.path)
    slot = Slot(info.path)
    try:
        slot.verify()
    finally:
        slot.close()


def tell_workers(
    memory: NodeMemory,
    plan: RecoveryPlan,
    nodes: Sequence[PeerNode],
    *,
    node_rank: int,
    number: int,
    durable: str | None,
) -> None:
    """Write what the workers of round `number` on this node restore from."""
    assert plan.iteration is not None, "there is something to restore"
    places = tuple(_places(memory, plan, nodes, node_rank)) if plan.source == "memory" else ()
    location = durable if plan.source == "durable" else None
    told = Reshard(plan.iteration, plan.world_size, number, places, location)
    write_json(memory.paths, memory.paths.reshard, told.to_json())


def _places(memory: NodeMemory, plan: RecoveryPlan, nodes: Sequence[PeerNode], node_rank: int) -> Iterable[ShardPlace]:
    for owner, holders in plan.copies:
        info = _slot(memory, plan, owner) if node_rank in holders else None
        # Each node begins with another one: the readers of a shard that many hold spread over them.
        turn = node_rank % len(holders)
        others = [rank for rank in (*holders[turn:], *holders[:turn]) if rank != node_rank]
        peers = tuple((nodes[rank].host, nodes[rank].port, nodes[rank].token) for rank in others)
        yield ShardPlace(owner, str(info.path) if info else None, peers)


def _slot(memory: NodeMemory, plan: RecoveryPlan, owner: int) -> SlotInfo | None:
    assert plan.iteration is not None, "there is something to restore"
    return memory.find(owner, plan.iteration, plan.world_size)
