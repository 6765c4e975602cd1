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
        world_size: ranks of the job that took that checkpoint; this round may have another number.
        fetches: with source "memory" and this round's number of ranks, what must be pulled from peers first.
        copies: with source "memory" and another number: (owner, node ranks that hold its slot) of every owner.
            Each rank then reads what it needs of them.
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
    world_size: int = 0
    copies: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RecoveryPlan:
        raw: dict[str, Any] = json.loads(text)
        raw["fetches"] = tuple(Fetch(**fetch) for fetch in raw["fetches"])
        raw["lost"] = tuple(raw["lost"])
        raw["history"] = as_history(raw["history"])
        raw["copies"] = tuple((owner, tuple(nodes)) for owner, nodes in raw.get("copies", ()))
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


def worker_ranks(nodes: Sequence[tuple[int, str]], node_rank: int) -> tuple[int, int, int, int]:
    """(global rank of the node's first worker, world size, its rank among those of its role, how many these are).

    Args:
        nodes: (local world size, role) of each node, by node rank.
    """
    sizes = [size for size, _ in nodes]
    role = nodes[node_rank][1]
    of_role = [size if other == role else 0 for size, other in nodes]
    return sum(sizes[:node_rank]), sum(sizes), sum(of_role[:node_rank]), sum(of_role)


# --- the plan ----------------------------------------------------------------------------------------


def plan_recovery(
    nodes: Sequence[NodeFacts],
    durable_iteration: int | None = None,
    durable_world_size: int | None = None,
    *,
    excluded: frozenset[tuple[int, int, int]] = frozenset(),
) -> RecoveryPlan:
    """The newest iteration that every rank can be given, and how. Same arguments, same plan.

    Args:
        nodes: all nodes of the round, any order.
        durable_iteration: newest usable one of the durable tier, if there is any.
        durable_world_size: ranks of the job that stored it; default: as many as this round has.
        excluded: copies not to be used: (node rank, owner, iteration).

    Memory is preferred unless the durable tier has a newer iteration. A checkpoint of another number of ranks serves
    as well, where it is newer.
    """
    nodes = sorted(nodes, key=lambda node: node.node_rank)
    world_size = sum(node.local_world_size for node in nodes)
    history = agreed_history(node.history for node in nodes)
    holders = _holders(nodes, history, excluded)
    newest_seen = max((iteration for iteration, _ in holders), default=None)
    whole = max(
        (key for key, owners in holders.items() if len(owners) == key[1]),
        key=lambda key: (key[0], key[1] == world_size, key[1]),
        default=None,
    )
    lost: tuple[int, ...] = ()
    if holders and whole is None:
        best = max(holders, key=lambda key: (len(holders[key]) / key[1], *key))
        lost = tuple(rank for rank in range(best[1]) if rank not in holders[best])

    if durable_iteration is not None and (whole is None or durable_iteration > whole[0]):
        if whole is not None:
            why = f"the durable tier has iteration {durable_iteration}, memory only {whole[0]}"
        else:
            why = f"{_why_not_memory(lost, newest_seen)}; the durable tier has {durable_iteration}"
        size = durable_world_size or world_size
        why += _of_another_size(size, world_size)
        return RecoveryPlan("durable", durable_iteration, (), lost, newest_seen, history, why, size)
    if whole is None:
        why = f"{_why_not_memory(lost, newest_seen)}; the durable tier has nothing usable"
        return RecoveryPlan("none", None, (), lost, newest_seen, history, why, world_size)

    iteration, size = whole
    why = f"memory holds iteration {iteration} of all {size} ranks{_of_another_size(size, world_size)}"
    if size != world_size:
        copies = tuple((owner, tuple(sorted(holders[whole][owner]))) for owner in range(size))
        return RecoveryPlan("memory", iteration, (), (), newest_seen, history, why, size, copies)
    fetches = _fetches(nodes, holders[whole], iteration)
    if fetches:
        why += f"; {len(fetches)} to be pulled from peers"
    return RecoveryPlan("memory", iteration, fetches, (), newest_seen, history, why, size)


def _holders(
    nodes: Sequence[NodeFacts], history: History, excluded: frozenset[tuple[int, int, int]]
) -> dict[tuple[int, int], dict[int, dict[int, int]]]:
    """(iteration, world size) -> owner -> node rank -> bytes, of valid slots only."""
    found: dict[tuple[int, int], dict[int, dict[int, int]]] = {}
    for node in nodes:
        for slot in node.slots:
            if (
                slot.owner < slot.world_size
                and on_course(slot.round, slot.iteration, history)
                and (node.node_rank, slot.owner, slot.iteration) not in excluded
            ):
                of_owner = found.setdefault((slot.iteration, slot.world_size), {}).setdefault(slot.owner, {})
                of_owner[node.node_rank] = slot.bytes
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


def _of_another_size(size: int, world_size: int) -> str:
    return "" if size == world_size else f", taken with {size} ranks and redistributed to {world_size}"


def _why_not_memory(lost: tuple[int, ...], newest_seen: int | None) -> str:
    if lost:
        return f"memory holds no copy of rank(s) {', '.join(map(str, lost))} (newest iteration seen: {newest_seen})"
    return "memory holds no usable slot"
