"""From what all nodes hold to one recovery plan, the same on every node. Pure.

Words: the *owner* of a slot is the global rank whose shard it holds; a node's *history* lists at which
iteration each round started, so that slots of an abandoned course of training are told from valid ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

History = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class SlotFact:
    """A complete slot that a node found in its memory (torn ones are never listed)."""

    owner: int
    iteration: int
    round: int
    world_size: int
    sealed: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class NodeFacts:
    """What one node brings to the plan. `node_rank` is its rank in the round that is being formed."""

    node_id: str
    node_rank: int
    local_world_size: int
    slots: tuple[SlotFact, ...] = ()
    history: History = ()


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Node `to_node` pulls the slot (owner, iteration) from node `from_node` (node ranks)."""

    owner: int
    iteration: int
    to_node: int
    from_node: int


@dataclasses.dataclass(frozen=True)
class RecoveryPlan:
    """What every node does before workers start.

    Attributes:
        source: "memory" (local slots and fetches), "durable" (everyone rebuilds its slots from there) or "none".
        iteration: that all ranks go back to; None with source "none".
        fetches: with source "memory", what must be pulled from peers first.
        lost: owners of whose shard memory holds no copy at the iteration that it covers best; empty where
            memory has a whole iteration, or nothing at all.
        newest_seen: newest iteration of which memory holds any valid slot.
        history: agreed by all nodes, without this round.
        reason: the choice in one sentence, for people.
    """

    source: str
    iteration: int | None
    fetches: tuple[Fetch, ...]
    lost: tuple[int, ...]
    newest_seen: int | None
    history: History
    reason: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RecoveryPlan:
        raw: dict[str, Any] = json.loads(text)
        raw["fetches"] = tuple(Fetch(**fetch) for fetch in raw["fetches"])
        raw["lost"] = tuple(raw["lost"])
        raw["history"] = as_history(raw["history"])
        return cls(**raw)


# --- history -----------------------------------------------------------------------------------------


def as_history(pairs: Iterable[Sequence[int]]) -> History:
    """Pairs as JSON gives them (lists of lists) as a History."""
    return tuple((int(pair[0]), int(pair[1])) for pair in pairs)


def extend_history(history: History, round: int, start: int) -> History:
    """`history` plus: `round` continued from iteration `start`.

    Earlier entries with the same or a later start say nothing more: whatever they forbid, this one does too.
    """
    kept = tuple(entry for entry in history if entry[0] < round and entry[1] < start)
    return (*kept, (round, start))


def agreed_history(histories: Iterable[History]) -> History:
    """The one that saw the newest round; all nodes choose the same."""
    return max(histories, key=lambda h: (h[-1][0] if h else -1, len(h), h), default=())


def on_course(round: int, iteration: int, history: History) -> bool:
    """Whether a slot of `round` at `iteration` belongs to the course of training that `history` tells:
    every later round started at that iteration or after it."""
    return all(iteration <= start for later, start in history if later > round)


# --- node ranks --------------------------------------------------------------------------------------


def assign_node_ranks(node_ids: Sequence[str], previous: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Sticky ranks: a node that stays keeps its node rank, a newcomer takes a free one.

    Args:
        node_ids: of this round, without repetition.
        previous: node id -> (round, node rank) as each node last had it. Of two that claim the same rank the
            one of the newer round keeps it; ranks that no longer exist are given up.

    Returns: node id -> node rank, a permutation of 0..len(node_ids)-1. Newcomers take the free ranks in order
        of their ids, so the order in which nodes arrived does not matter.
    """
    ranks: dict[str, int] = {}
    claims = sorted((-previous[n][0], n) for n in node_ids if n in previous)
    for _, node in claims:
        rank = previous[node][1]
        if 0 <= rank < len(node_ids) and rank not in ranks.values():
            ranks[node] = rank
    free = [rank for rank in range(len(node_ids)) if rank not in ranks.values()]
    for node in sorted(n for n in node_ids if n not in ranks):
        ranks[node] = free.pop(0)
    return ranks


def rank_ranges(local_world_sizes: Sequence[int]) -> list[range]:
    """Global ranks of each node, by node rank (torch elastic's rule: cumulative)."""
    ranges, first = [], 0
    for size in local_world_sizes:
        ranges.append(range(first, first + size))
        first += size
    return ranges


# --- the plan ----------------------------------------------------------------------------------------


def plan_recovery(
    nodes: Sequence[NodeFacts],
    durable_iteration: int | None = None,
    *,
    excluded: frozenset[tuple[int, int, int]] = frozenset(),
) -> RecoveryPlan:
    """The newest iteration that every rank can be given, and how. Same arguments, same plan.

    Args:
        nodes: all nodes of the round, any order.
        durable_iteration: newest usable one of the durable tier, if there is any.
        excluded: copies not to be used: (node rank, owner, iteration).

    Memory is preferred unless the durable tier has a newer iteration. Slots of another world size cannot be
    restored from memory.
    """
    nodes = sorted(nodes, key=lambda node: node.node_rank)
    world_size = sum(node.local_world_size for node in nodes)
    history = agreed_history(node.history for node in nodes)
    holders = _holders(nodes, history, world_size, excluded)
    newest_seen = max(holders, default=None)
    whole = max((i for i, owners in holders.items() if len(owners) == world_size), default=None)
    lost: tuple[int, ...] = ()
    if holders and whole is None:
        best = max(holders, key=lambda i: (len(holders[i]), i))
        lost = tuple(rank for rank in range(world_size) if rank not in holders[best])

    if durable_iteration is not None and (whole is None or durable_iteration > whole):
        if whole is not None:
            why = f"the durable tier has iteration {durable_iteration}, memory only {whole}"
        else:
            why = f"{_why_not_memory(nodes, lost, newest_seen, world_size)}; the durable tier has {durable_iteration}"
        return RecoveryPlan("durable", durable_iteration, (), lost, newest_seen, history, why)
    if whole is None:
        why = f"{_why_not_memory(nodes, lost, newest_seen, world_size)}; the durable tier has nothing usable"
        return RecoveryPlan("none", None, (), lost, newest_seen, history, why)

    fetches = _fetches(nodes, holders[whole], whole)
    why = f"memory holds iteration {whole} of all {world_size} ranks"
    if fetches:
        why += f"; {len(fetches)} to be pulled from peers"
    return RecoveryPlan("memory", whole, fetches, (), newest_seen, history, why)


def _holders(
    nodes: Sequence[NodeFacts], history: History, world_size: int, excluded: frozenset[tuple[int, int, int]]
) -> dict[int, dict[int, dict[int, int]]]:
    """iteration -> owner -> node rank -> bytes, of valid slots only."""
    found: dict[int, dict[int, dict[int, int]]] = {}
    for node in nodes:
        for slot in node.slots:
            if (
                slot.world_size == world_size
                and slot.owner < world_size
                and on_course(slot.round, slot.iteration, history)
                and (node.node_rank, slot.owner, slot.iteration) not in excluded
            ):
                found.setdefault(slot.iteration, {}).setdefault(slot.owner, {})[node.node_rank] = slot.bytes
    return found


def _fetches(nodes: Sequence[NodeFacts], holders: Mapping[int, Mapping[int, int]], iteration: int) -> tuple[Fetch, ...]:
    load = {node.node_rank: 0 for node in nodes}  # bytes that each node is asked to send
    fetches = []
    for node, owners in zip(nodes, rank_ranges([n.local_world_size for n in nodes]), strict=True):
        for owner in owners:
            copies = holders[owner]
            if node.node_rank in copies:
                continue
            source = min(copies, key=lambda rank: (load[rank], rank))
            load[source] += copies[source]
            fetches.append(Fetch(owner, iteration, node.node_rank, source))
    return tuple(fetches)


def _why_not_memory(nodes: Sequence[NodeFacts], lost: tuple[int, ...], newest_seen: int | None, world_size: int) -> str:
    if lost:
        return f"memory holds no copy of rank(s) {', '.join(map(str, lost))} (newest iteration seen: {newest_seen})"
    others: dict[int, int] = {}
    for slot in (slot for node in nodes for slot in node.slots if slot.world_size != world_size):
        others[slot.world_size] = max(slot.iteration, others.get(slot.world_size, 0))
    if others:
        what = ", ".join(f"iteration {i} of {size} ranks" for size, i in sorted(others.items()))
        return f"memory holds {what}, this job has {world_size} ranks"
    return "memory holds no usable slot"
