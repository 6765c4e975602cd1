"""Algorithm 1: every property by brute force over all small jobs."""

from __future__ import annotations

import itertools

import pytest

from gemini_run.plan.placement import placement

SMALL = [(n, m) for n in range(1, 13) for m in range(1, n + 1)]


@pytest.mark.parametrize(("n", "m"), SMALL)
def test_every_shard_has_m_copies_on_distinct_nodes(n: int, m: int) -> None:
    plan = placement(n, m)
    for node in range(n):
        holders = plan.holders(node)
        assert len(set(holders)) == m and holders[0] == node
        assert all(0 <= holder < n for holder in holders)


@pytest.mark.parametrize(("n", "m"), SMALL)
def test_sending_and_receiving_mirror_each_other(n: int, m: int) -> None:
    plan = placement(n, m)
    for a, b in itertools.product(range(n), repeat=2):
        assert (b in plan.sends_to(a)) == (a in plan.receives_from(b))
    assert {len(plan.receives_from(node)) for node in range(n)} == {m - 1}  # equal load


@pytest.mark.parametrize(("n", "m"), SMALL)
def test_groups_partition_the_nodes_and_contain_all_traffic(n: int, m: int) -> None:
    plan = placement(n, m)
    assert sorted(itertools.chain(*plan.groups)) == list(range(n))
    for group in plan.groups:
        for node in group:
            assert set(plan.sends_to(node)) <= set(group)
            assert plan.group_of(node) == group


@pytest.mark.parametrize(("n", "m"), SMALL)
def test_shape_is_algorithm_1(n: int, m: int) -> None:
    plan = placement(n, m)
    if n % m == 0:
        assert plan.ring == ()
        assert plan.groups == tuple(tuple(range(m * i, m * i + m)) for i in range(n // m))
    else:
        assert len(plan.ring) == m + n % m
        assert plan.ring == tuple(range(n - len(plan.ring), n))
        assert plan.groups[-1] == plan.ring
        assert all(len(group) == m for group in plan.groups[:-1])


@pytest.mark.parametrize(("n", "m"), SMALL)
def test_any_loss_of_fewer_than_m_nodes_leaves_a_copy(n: int, m: int) -> None:
    plan = placement(n, m)
    for lost in itertools.combinations(range(n), m - 1):
        assert all(set(plan.holders(node)) - set(lost) for node in range(n))


@pytest.mark.parametrize(("n", "m"), [(n, m) for n, m in SMALL if n % m == 0 and n <= 8])
def test_group_placement_loses_a_shard_only_with_a_whole_group(n: int, m: int) -> None:
    plan = placement(n, m)
    for count in range(n + 1):
        for lost in itertools.combinations(range(n), count):
            fatal = any(set(plan.holders(node)) <= set(lost) for node in range(n))
            assert fatal == any(set(group) <= set(lost) for group in plan.groups)


@pytest.mark.parametrize(("n", "m"), [(n, m) for n, m in SMALL if n % m and n <= 9])
def test_ring_loses_a_shard_only_with_m_consecutive_nodes(n: int, m: int) -> None:
    plan = placement(n, m)
    ring = plan.ring
    runs = [{ring[(start + k) % len(ring)] for k in range(m)} for start in range(len(ring))]
    for count in range(len(ring) + 1):
        for lost in itertools.combinations(ring, count):
            fatal = any(set(plan.holders(node)) <= set(lost) for node in ring)
            assert fatal == any(run <= set(lost) for run in runs)


def test_the_papers_mixed_example() -> None:
    plan = placement(5, 2)
    assert plan.groups == ((0, 1), (2, 3, 4))
    assert [plan.sends_to(node) for node in range(5)] == [(1,), (0,), (3,), (4,), (2,)]


@pytest.mark.parametrize(("n", "m"), [(1, 2), (3, 4), (2, 0), (0, 1), (0, 0)])
def test_more_copies_than_nodes_is_refused(n: int, m: int) -> None:
    with pytest.raises(ValueError, match="replicas on"):
        placement(n, m)


def test_unknown_node() -> None:
    with pytest.raises(ValueError, match="no node 4"):
        placement(4, 2).sends_to(4)
