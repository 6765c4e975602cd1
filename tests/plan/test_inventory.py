"""What copies in memory are worth."""

from __future__ import annotations

from collections.abc import Iterable

from gemini_run.plan.inventory import MemoryHealth, memory_health
from gemini_run.plan.recovery import NodeFacts, SlotFact


def node(rank: int, slots: Iterable[tuple[int, int]], *, world: int = 2, local: int = 1, round: int = 0,
         history: tuple[tuple[int, int], ...] = ((0, 0),)) -> NodeFacts:  # fmt: skip
    facts = tuple(SlotFact(owner, iteration, round, world, True, 10) for owner, iteration in slots)
    return NodeFacts(f"n{rank}", rank, local, facts, history)


def test_replicated_everywhere() -> None:
    both = [(0, 4), (0, 5), (1, 4), (1, 5)]
    health = memory_health([node(1, both), node(0, both)])
    assert (health.local, health.peer, health.newest) == (5, 5, 5)
    assert health.expendable == (0, 1)
    assert [(r.rank, r.holders, r.local) for r in health.ranks] == [(0, (0, 1), True), (1, (0, 1), True)]


def test_the_peer_tier_lags() -> None:
    health = memory_health([node(0, [(0, 5), (0, 4), (1, 4)]), node(1, [(1, 5), (1, 4), (0, 4)])])
    assert (health.local, health.peer, health.newest, health.at) == (5, 4, 5, 4)
    assert health.expendable == (0, 1)


def test_without_replicas_nobody_may_be_lost() -> None:
    health = memory_health([node(0, [(0, 5)]), node(1, [(1, 5)])])
    assert (health.local, health.peer, health.at, health.expendable) == (5, None, 5, ())


def test_a_newcomer_has_nothing_yet_and_may_go_again() -> None:
    health = memory_health([node(0, [(0, 5), (1, 5)]), node(1, [])])
    assert (health.local, health.peer, health.newest) == (None, None, 5)
    assert health.expendable == (1,)
    assert [r.local for r in health.ranks] == [True, False]


def test_one_node_has_no_peer_tier() -> None:
    health = memory_health([node(0, [(0, 3), (1, 3)], local=2)])
    assert (health.local, health.peer, health.newest, health.expendable) == (3, None, 3, ())


def test_a_shard_that_nobody_holds() -> None:
    health = memory_health([node(0, [(0, 5)]), node(1, [(0, 5)])])
    assert health == MemoryHealth(None, None, None, None, (), ())


def test_abandoned_course_and_other_worlds_do_not_count() -> None:
    history = ((0, 0), (1, 5))
    stale = [node(r, [(0, 9), (1, 9), (0, 5), (1, 5)], history=history) for r in (0, 1)]
    assert memory_health(stale).newest == 5
    other = [node(r, [(0, 9), (1, 9)], world=4) for r in (0, 1)]
    assert memory_health(other).newest is None


def test_no_nodes() -> None:
    assert memory_health([]) == MemoryHealth(None, None, None, None, (), ())
