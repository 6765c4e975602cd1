"""What the copies in memory are worth: the newest whole iteration of each tier, and who may be lost. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gemini_run.plan.recovery import Fetch, NodeFacts, agreed_history, on_course, rank_ranges


@dataclasses.dataclass(frozen=True)
class RankHealth:
    """Copies of one rank's shard at `MemoryHealth.at`.

    Attributes:
        holders: node ranks with a usable copy.
        local: whether its own node is one of them.
    """

    rank: int
    node_rank: int
    holders: tuple[int, ...]

    @property
    def local(self) -> bool:
        return self.node_rank in self.holders


@dataclasses.dataclass(frozen=True)
class MemoryHealth:
    """Attributes:
    local: newest iteration of which every rank's slot is on its own node.
    peer: newest of which every rank has a copy on another node.
    newest: newest of which every rank has a copy anywhere.
    at: what the rest is about: `peer` where there is one (newer iterations are still on their way to the
        peers), else `newest`.
    ranks: copies of each rank at `at`; empty without one.
    expendable: node ranks, each of which may be lost alone without going back behind `at`.
    replicated: newest of which every rank has as many copies as are wanted.
    """

    local: int | None
    peer: int | None
    newest: int | None
    at: int | None
    ranks: tuple[RankHealth, ...]
    expendable: tuple[int, ...]
    replicated: int | None = None


def after_fetches(nodes: Sequence[NodeFacts], fetches: Sequence[Fetch]) -> list[NodeFacts]:
    """`nodes` once these pulls are done."""
    found = []
    for node in nodes:
        pulled = []
        for fetch in fetches:
            if fetch.to_node == node.node_rank:
                giver = next(other for other in nodes if other.node_rank == fetch.from_node)
                pulled += [s for s in giver.slots if (s.owner, s.iteration) == (fetch.owner, fetch.iteration)]
        found.append(dataclasses.replace(node, slots=(*node.slots, *pulled)))
    return found


def memory_health(nodes: Sequence[NodeFacts], copies: int = 1) -> MemoryHealth:
    """Judge the slots of `nodes`, which are the nodes of one round with node ranks 0..n-1, in any order.

    Slots of an abandoned course of training or of another world size do not count.

    Args:
        copies: of each shard that are wanted, the local one included.
    """
    nodes = sorted(nodes, key=lambda node: node.node_rank)
    ranges = rank_ranges([node.local_world_size for node in nodes])
    home = {rank: node.node_rank for node, own in zip(nodes, ranges, strict=True) for rank in own}
    history = agreed_history(node.history for node in nodes)
    holders: dict[int, dict[int, set[int]]] = {}  # iteration -> rank -> node ranks
    for node in nodes:
        for slot in node.slots:
            if slot.world_size == len(home) and slot.owner in home and on_course(slot.round, slot.iteration, history):
                holders.setdefault(slot.iteration, {}).setdefault(slot.owner, set()).add(node.node_rank)

    def newest(whole: dict[int, bool]) -> int | None:
        return max((iteration for iteration, yes in whole.items() if yes), default=None)

    everyone = home.keys()
    anywhere = newest({i: held.keys() == everyone for i, held in holders.items()})
    local = newest({i: all(home[r] in held.get(r, ()) for r in everyone) for i, held in holders.items()})
    peer = newest({i: all(held.get(r, set()) - {home[r]} for r in everyone) for i, held in holders.items()})
    replicated = newest({i: all(len(held.get(r, ())) >= copies for r in everyone) for i, held in holders.items()})
    at = anywhere if peer is None else peer
    if at is None or not home:
        return MemoryHealth(local, peer, anywhere, None, (), ())
    held = holders[at]
    ranks = tuple(RankHealth(rank, home[rank], tuple(sorted(held[rank]))) for rank in sorted(home))
    expendable = tuple(
        node.node_rank for node in nodes if all(set(health.holders) - {node.node_rank} for health in ranks)
    )
    return MemoryHealth(local, peer, anywhere, at, ranks, expendable, replicated)
