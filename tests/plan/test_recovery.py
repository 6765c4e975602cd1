"""The recovery plan as a table: what the nodes hold, and what must come of it."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from gemini_run.plan.placement import placement
from gemini_run.plan.recovery import (
    Fetch,
    NodeFacts,
    RecoveryPlan,
    SlotFact,
    agreed_history,
    assign_node_ranks,
    extend_history,
    on_course,
    plan_recovery,
    rank_ranges,
)


def slot(owner: int, iteration: int, *, round: int = 0, world: int = 2, size: int = 100) -> SlotFact:
    return SlotFact(owner, iteration, round, world, True, size)


def node(rank: int, *slots: SlotFact, local: int = 1, history: tuple[tuple[int, int], ...] = ((0, 0),)) -> NodeFacts:
    return NodeFacts(f"n{rank}", rank, local, slots, history)


def summary(plan: RecoveryPlan) -> tuple[str, int | None, tuple[tuple[int, int, int], ...], tuple[int, ...]]:
    return plan.source, plan.iteration, tuple((f.owner, f.to_node, f.from_node) for f in plan.fetches), plan.lost


both10 = (slot(0, 10), slot(1, 10))

TABLE = {
    "nothing anywhere": ([node(0), node(1)], None, ("none", None, (), ())),
    "all local": ([node(0, slot(0, 10)), node(1, slot(1, 10))], None, ("memory", 10, (), ())),
    "local preferred to a replica": ([node(0, *both10), node(1, *both10)], None, ("memory", 10, (), ())),
    "newest common iteration": (
        [node(0, slot(0, 10), slot(0, 11)), node(1, slot(1, 11), slot(1, 12))],
        None,
        ("memory", 11, (), ()),
    ),
    "ranks one iteration apart, one torn": (  # rank 1 died while it wrote 11: that slot is not listed
        [node(0, slot(0, 10), slot(0, 11)), node(1, slot(1, 10))],
        None,
        ("memory", 10, (), ()),
    ),
    "replica only": ([node(0, *both10), node(1)], None, ("memory", 10, ((1, 1, 0),), ())),
    "a newer replica beats older local slots": (
        [node(0, slot(0, 10), slot(0, 11), slot(1, 11)), node(1, slot(1, 10))],
        None,
        ("memory", 11, ((1, 1, 0),), ()),
    ),
    "shards swapped between the nodes": (
        [node(0, slot(1, 10)), node(1, slot(0, 10))],
        None,
        ("memory", 10, ((0, 0, 1), (1, 1, 0)), ()),
    ),
    "both copies of rank 1 lost": ([node(0, slot(0, 47)), node(1)], None, ("none", None, (), (1,))),
    "both copies lost, durable": ([node(0, slot(0, 47)), node(1)], 40, ("durable", 40, (), (1,))),
    "durable older than memory": ([node(0, slot(0, 10)), node(1, slot(1, 10))], 9, ("memory", 10, (), ())),
    "durable as new as memory": ([node(0, slot(0, 10)), node(1, slot(1, 10))], 10, ("memory", 10, (), ())),
    "durable newer than memory": ([node(0, slot(0, 10)), node(1, slot(1, 10))], 11, ("durable", 11, (), ())),
    "durable only": ([node(0), node(1)], 5, ("durable", 5, (), ())),
    "another world size": (
        [node(0, slot(0, 10, world=4), slot(1, 10, world=4)), node(1, slot(2, 10, world=4), slot(3, 10, world=4))],
        None,
        ("memory", 10, (), ()),
    ),
    "half of another world": (
        [node(0, slot(0, 10, world=4), slot(1, 10, world=4)), node(1)],
        None,
        ("none", None, (), (2, 3)),
    ),
    "another world, then ours": (
        [node(0, slot(0, 10, world=1), slot(0, 11)), node(1, slot(1, 11))],
        None,
        ("memory", 11, (), ()),
    ),
    "another world, ours not yet complete": (
        [node(0, slot(0, 10, world=1), slot(0, 11)), node(1)],
        None,
        ("memory", 10, (), ()),
    ),
    "another world size beside ours": (
        [node(0, slot(0, 90, world=4), slot(0, 10)), node(1, slot(1, 10), slot(1, 90, world=4))],
        None,
        ("memory", 10, (), ()),
    ),
    "another world size, durable": ([node(0, slot(0, 10, world=4)), node(1)], 3, ("durable", 3, (), (1, 2, 3))),
    "stale after a fall back": (  # round 1 went back to 5: round 0's 8 is of an abandoned course
        [node(0, slot(0, 8), slot(0, 5)), node(1, slot(1, 8), slot(1, 5), history=((0, 0), (1, 5)))],
        None,
        ("memory", 5, (), ()),
    ),
    "new course past the stale one": (
        [
            node(0, slot(0, 8), slot(0, 6, round=1), history=((0, 0), (1, 5))),
            node(1, slot(1, 8), slot(1, 6, round=1), history=((0, 0), (1, 5))),
        ],
        None,
        ("memory", 6, (), ()),
    ),
    "a stale copy is no source": (
        [node(0, slot(0, 8, round=1), history=((1, 5),)), node(1, slot(1, 8), history=((1, 5),))],
        None,
        ("none", None, (), (1,)),
    ),
    "skew among the survivors is not taken for a loss": (  # rank 1 is behind, not lost; ranks 2, 3 are
        [
            node(0, slot(0, 10, world=4), slot(0, 11, world=4)),
            node(1, slot(1, 10, world=4)),
            node(2),
            node(3),
        ],
        7,
        ("durable", 7, (), (2, 3)),
    ),
    "several ranks a node": (
        [
            node(0, *(slot(r, 10, world=4) for r in range(4)), local=2),
            node(1, local=2),
        ],
        None,
        ("memory", 10, ((2, 1, 0), (3, 1, 0)), ()),
    ),
    "unequal nodes": (
        [node(1, slot(2, 4, world=3)), node(0, slot(0, 4, world=3), slot(1, 4, world=3), local=2)],
        None,
        ("memory", 4, (), ()),
    ),
    "the load is spread over holders": (
        [
            node(0, *(slot(r, 10, world=4) for r in range(4))),
            node(1, *(slot(r, 10, world=4) for r in range(4))),
            node(2),
            node(3),
        ],
        None,
        ("memory", 10, ((2, 2, 0), (3, 3, 1)), ()),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    nodes, durable, expected = TABLE[case]
    assert summary(plan_recovery(nodes, durable)) == expected


@pytest.mark.parametrize("case", TABLE)
def test_every_node_computes_the_same_whatever_the_order(case: str) -> None:
    nodes, durable, _ = TABLE[case]
    plans = set()
    for seed, order in enumerate(itertools.permutations(nodes)):
        shuffle = random.Random(seed).sample
        plans.add(
            plan_recovery([dataclasses.replace(n, slots=tuple(shuffle(n.slots, len(n.slots)))) for n in order], durable)
        )
    assert len(plans) == 1
    [plan] = plans
    assert RecoveryPlan.from_json(plan.to_json()) == plan


def paper_nodes(lost: set[int], n: int = 4, m: int = 2) -> list[NodeFacts]:
    """`n` nodes of one rank that held everything that placement gives them, and lost nodes replaced by empty ones."""
    plan = placement(n, m)
    return [
        node(k) if k in lost else node(k, *(slot(o, 10, world=n) for o in (k, *plan.receives_from(k))))
        for k in range(n)
    ]


@pytest.mark.parametrize("count", range(5))
def test_four_nodes_with_two_replicas_recover_unless_a_group_is_lost(count: int) -> None:
    for lost in map(set, itertools.combinations(range(4), count)):
        plan = plan_recovery(paper_nodes(lost))
        gone = tuple(k for group in ((0, 1), (2, 3)) if set(group) <= lost for k in group)
        if not gone:
            assert (plan.source, plan.iteration) == ("memory", 10)
            assert {(f.owner, f.to_node) for f in plan.fetches} == {(k, k) for k in lost}
            assert all(f.from_node not in lost for f in plan.fetches)
        else:
            assert plan.source == "none"
            assert plan.lost == (() if count == 4 else gone)


def test_an_excluded_copy_is_not_used() -> None:
    nodes = [node(0, slot(0, 9), *both10), node(1, slot(1, 9), slot(1, 10))]
    assert summary(plan_recovery(nodes, excluded=frozenset({(1, 1, 10)}))) == ("memory", 10, ((1, 1, 0),), ())
    both = frozenset({(1, 1, 10), (0, 1, 10)})
    assert summary(plan_recovery(nodes, excluded=both)) == ("memory", 9, (), ())


def test_reasons_say_what_a_person_must_know() -> None:
    reason = plan_recovery(TABLE["another world size"][0]).reason
    assert "iteration 10 of all 4 ranks, taken with 4 ranks and redistributed to 2" in reason
    assert "no copy of rank(s) 1" in plan_recovery(TABLE["both copies lost, durable"][0], 40).reason
    assert "1 to be pulled" in plan_recovery(TABLE["replica only"][0]).reason


def test_newest_seen_is_of_valid_slots_only() -> None:
    assert plan_recovery(TABLE["stale after a fall back"][0]).newest_seen == 5
    assert plan_recovery(TABLE["both copies of rank 1 lost"][0]).newest_seen == 47
    assert plan_recovery(TABLE["another world size"][0]).newest_seen == 10


def test_a_plan_for_another_world_size_says_who_holds_what() -> None:
    ten = [slot(owner, 10, world=3) for owner in range(3)]
    plan = plan_recovery([node(0, ten[0], ten[1]), node(1, ten[1], ten[2])])
    assert (plan.world_size, plan.copies) == (3, ((0, (0,)), (1, (0, 1)), (2, (1,))))
    assert RecoveryPlan.from_json(plan.to_json()) == plan
    without = plan_recovery([node(0, ten[0], ten[1]), node(1, ten[1], ten[2])], excluded=frozenset({(0, 1, 10)}))
    assert dict(without.copies)[1] == (1,)
    durable = plan_recovery([node(0), node(1)], 5, 8)
    assert (durable.source, durable.iteration, durable.world_size, durable.copies) == ("durable", 5, 8, ())
    assert plan_recovery([node(0, slot(0, 9)), node(1, slot(1, 9))]).world_size == 2


# --- history -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("round", "iteration", "history", "valid"),
    [
        (0, 8, (), True),
        (0, 8, ((0, 0),), True),
        (0, 8, ((0, 0), (1, 8)), True),  # round 1 continued from it
        (0, 9, ((0, 0), (1, 8)), False),
        (1, 9, ((0, 0), (1, 8)), True),
        (1, 9, ((0, 0), (1, 8), (2, 9), (3, 7)), False),
        (3, 8, ((3, 7),), True),
        (0, 1, ((4, 0),), False),  # started from scratch since
    ],
)
def test_on_course(round: int, iteration: int, history: tuple[tuple[int, int], ...], valid: bool) -> None:
    assert on_course(round, iteration, history) is valid


def test_a_shortened_history_judges_every_slot_as_the_full_one() -> None:
    rng = random.Random(3)
    for _ in range(50):
        full: tuple[tuple[int, int], ...] = ()
        short = full
        for number in range(8):
            start = rng.randrange(12)
            full, short = (*full, (number, start)), extend_history(short, number, start)
        for written, iteration in itertools.product(range(8), range(12)):
            assert on_course(written, iteration, full) == on_course(written, iteration, short)
        assert short[-1] == full[-1]


def test_the_history_of_the_newest_round_wins() -> None:
    assert agreed_history([((0, 0),), ((0, 0), (1, 5)), ()]) == ((0, 0), (1, 5))
    assert agreed_history([]) == ()


# --- node ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "previous", "expected"),
    [
        (["b", "a"], {}, {"a": 0, "b": 1}),
        (["a", "b", "c"], {"a": (0, 2), "b": (0, 0), "c": (0, 1)}, {"a": 2, "b": 0, "c": 1}),
        (["a", "x", "c"], {"a": (3, 2), "c": (3, 1)}, {"a": 2, "x": 0, "c": 1}),
        (["y", "x", "c"], {"c": (3, 1)}, {"x": 0, "c": 1, "y": 2}),
        (["a", "b"], {"a": (1, 0), "b": (4, 0)}, {"a": 1, "b": 0}),  # the newer claim wins
        (["a", "b"], {"a": (1, 5), "b": (1, 1)}, {"a": 0, "b": 1}),  # the job has shrunk
        (["a", "b"], {"a": (1, 0), "b": (1, 0)}, {"a": 0, "b": 1}),
    ],
)
def test_sticky_ranks(ids: list[str], previous: dict[str, tuple[int, int]], expected: dict[str, int]) -> None:
    for order in itertools.permutations(ids):
        assert assign_node_ranks(order, previous) == expected


def test_rank_ranges_are_cumulative() -> None:
    assert rank_ranges([2, 1, 3]) == [range(0, 2), range(2, 3), range(3, 6)]


def test_fetch_is_data() -> None:
    assert Fetch(1, 10, 1, 0) == Fetch(owner=1, iteration=10, to_node=1, from_node=0)
