"""Failure domains, parallel groups and shards held alike: properties over all small jobs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from gemini_run.plan.placement import Placement, placement


def partitions(total: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum of sizes, largest first."""
    if total == 0:
        yield ()
    for first in range(min(total, largest or total), 0, -1):
        for rest in partitions(total - first, first):
            yield (first, *rest)


def labels(sizes: tuple[int, ...], interleaved: bool) -> list[str]:
    """Node labels for domains of these sizes: one domain after the other, or in turn."""
    runs = [[f"rack{i}"] * size for i, size in enumerate(sizes)]
    if not interleaved:
        return list(itertools.chain(*runs))
    return [label for column in itertools.zip_longest(*runs) for label in column if label is not None]


CASES = [
    (n, m, labels(sizes, interleaved))
    for n in range(2, 10)
    for m in range(2, n + 1)
    for sizes in partitions(n)
    for interleaved in (False, True)
]


def repeats(plan: Placement, of: list[str]) -> list[int]:
    return [v for v in range(plan.num_nodes) if len({of[h] for h in plan.holders(v)}) < plan.replicas]


def faults_of(plan: Placement, of: list[str]) -> tuple[int, int]:
    """(shards with all copies in one domain, copies beyond the first in a domain)."""
    spans = [len({of[h] for h in plan.holders(v)}) for v in range(plan.num_nodes)]
    return spans.count(1), sum(plan.replicas - span for span in spans)


def sound(plan: Placement) -> None:
    """What holds of every placement without `alike`: m copies each, the load equal, traffic inside groups."""
    n, m = plan.num_nodes, plan.replicas
    assert sorted(itertools.chain(*plan.groups)) == list(range(n))
    assert all(len(group) == m for group in plan.groups if group != plan.ring)
    for node in range(n):
        assert len(set(plan.holders(node))) == m
        assert len(plan.receives_from(node)) == m - 1
        assert set(plan.sends_to(node)) <= set(plan.group_of(node))


def test_no_two_copies_in_one_domain_wherever_equal_load_allows_it() -> None:
    for n, m, of in CASES:
        plan = placement(n, m, domains=of)
        sound(plan)
        largest = max(of.count(label) for label in of)
        if largest <= n // m:
            assert repeats(plan, of) == [] and plan.unavoided == (), (n, m, of)
        else:  # the largest domain alone touches more holder sets than there are
            assert repeats(plan, of), (n, m, of)
            assert len(plan.unavoided) == 1 and plan.unavoided[0].startswith(f"{len(repeats(plan, of))} of {n} nodes")


def test_the_ring_is_no_longer_than_the_domains_force_it_to_be() -> None:
    for n, m, of in CASES:
        sizes = [of.count(label) for label in set(of)]
        plan = placement(n, m, domains=of)
        if n % m == 0:
            assert plan.ring == ()
        elif max(sizes) <= n // m:
            rows = (len(plan.ring) - n % m) // m
            assert len(plan.ring) == m * rows + n % m
            # A ring of m*j + q nodes with no domain twice in a window holds at most j of each.
            for fewer in range(1, rows):
                assert sum(min(fewer, size) for size in sizes) < m * fewer + n % m, (n, m, of)
        else:
            assert len(plan.ring) == m + n % m


@pytest.mark.parametrize(("m", "sizes"), [
    (6, (3, 3, 3, 2, 2, 2, 2, 3, 2)), (5, (2, 3, 2, 2, 3, 3, 2, 2)), (3, (7, 7, 7, 2)), (4, (16,) * 4 + (3,)),
])  # fmt: skip
def test_larger_jobs_whose_ring_must_take_from_the_largest_domains(m: int, sizes: tuple[int, ...]) -> None:
    of = labels(sizes, interleaved=False)
    assert max(sizes) <= len(of) // m
    plan = placement(len(of), m, domains=of)
    sound(plan)
    assert repeats(plan, of) == [] and plan.unavoided == () and plan.ring


def test_groups_spread_as_evenly_as_counting_allows() -> None:
    """Where a domain is too large for m | N, the copies too many are the fewest possible: sum of m*c - N."""
    for n, m, of in CASES:
        if n % m:
            continue
        plan = placement(n, m, domains=of)
        excess = sum(m - len({of[h] for h in plan.holders(v)}) for v in range(n))
        assert excess == sum(max(0, m * of.count(label) - n) for label in set(of)), (n, m, of)


def test_order_stays_where_nothing_is_gained() -> None:
    assert placement(8, 2, domains=["a", "b"] * 4) == placement(8, 2)
    assert placement(7, 3, domains=["a"] * 7).groups == placement(7, 3).groups
    assert placement(6, 3, domains=[None] * 6) == placement(6, 3)


def test_racks_in_a_row_are_paired() -> None:
    plan = placement(8, 2, domains=["a"] * 4 + ["b"] * 4)
    assert plan.groups == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_an_unknown_domain_is_one_of_its_own() -> None:
    plan = placement(4, 2, domains=["a", "a", None, None])
    assert repeats(plan, ["a", "a", "x", "y"]) == []


def test_the_statement_names_the_domain_and_the_numbers() -> None:
    (said,) = placement(5, 2, domains=["r1", "r1", "r1", "r1", "r2"]).unavoided
    assert "domain" in said and "r1 alone has 4 of the 5 nodes" in said and "2 domains" in said


def test_parallel_groups_are_avoided() -> None:
    pipelines = ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    plan = placement(8, 2, parallel=pipelines)
    assert plan.unavoided == () and repeats(plan, pipelines) == []
    assert repeats(placement(8, 2), pipelines) == list(range(8))


def test_parallel_groups_never_make_the_ring_longer() -> None:
    for n, m, of in CASES:
        plan = placement(n, m, parallel=of)
        sound(plan)
        assert len(plan.ring) == (m + n % m if n % m else 0)
        assert bool(plan.unavoided) == any(of[h] == of[v] for v in range(n) for h in plan.sends_to(v))


def test_domains_come_before_parallel_groups() -> None:
    racks, pipelines = [f"r{i // 4}" for i in range(16)], [f"p{i % 4}" for i in range(16)]
    plan = placement(16, 2, domains=racks, parallel=pipelines)
    sound(plan)
    assert repeats(plan, racks) == [] and repeats(plan, pipelines) == []
    # A pipeline in each rack's place: both at once is impossible only where racks and pipelines leave no pair.
    plan = placement(4, 2, domains=["a", "a", "b", "b"], parallel=["p", "p", "p", "q"])
    assert repeats(plan, ["a", "a", "b", "b"]) == []
    assert plan.unavoided == ("2 of 4 nodes have a copy in their own parallel group",)


def test_what_is_held_alike_counts_and_is_not_sent() -> None:
    plan = placement(8, 2, alike=[f"shard{i % 4}" for i in range(8)])
    assert all(plan.sends_to(v) == () == plan.receives_from(v) for v in range(8))
    assert [plan.holders(v) for v in range(8)] == [(v, (v + 4) % 8) for v in range(8)]
    assert sorted(plan.groups) == [(v,) for v in range(8)]


@pytest.mark.parametrize("m", [2, 3, 4])
def test_only_what_lacks_to_m_copies_is_sent(m: int) -> None:
    for n in range(m, 10):
        for sizes in partitions(n):
            of = labels(sizes, interleaved=True)
            plan = placement(n, m, alike=of)
            sent = {label: sum(len(plan.sends_to(v)) for v in range(n) if of[v] == label) for label in of}
            assert sent == {label: max(0, m - of.count(label)) for label in of}, (n, of)
            for v in range(n):
                assert len(set(plan.holders(v))) == max(m, of.count(of[v]))
                assert set(plan.sends_to(v)) <= set(plan.group_of(v))
                assert all(v in plan.sends_to(giver) for giver in plan.receives_from(v))


def test_who_holds_the_same_is_put_together() -> None:
    """Two replicas of a model that is sharded over 2 racks of nodes: the copies leave the owner's shard group."""
    assert placement(8, 2, together=[0, 1, 2, 3] * 2).groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    racks = ["a"] * 4 + ["b"] * 4
    assert placement(8, 2, domains=racks, together=[0, 1, 2, 3] * 2).groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    # In one rack they must not be together; what is left over (of three, with m = 2) goes its ordinary way.
    assert placement(8, 2, domains=racks, together=[0, 0, 1, 1, 2, 2, 3, 3]) == placement(8, 2, domains=racks)
    assert placement(7, 2, together=[0, 1, 0, 1, 0, 1, 6]).groups == ((0, 2), (1, 3), (4, 5, 6))
    assert placement(5, 3, together=[0] * 5) == placement(5, 3)
    for n, m, of in (case for case in CASES if case[0] < 8):
        for spread in (2, 3):
            for together in ([node % spread for node in range(n)], [node * spread // n for node in range(n)]):
                free, bound = placement(n, m, together=together), placement(n, m, domains=of, together=together)
                for plan in (free, bound):
                    sound(plan)
                    assert len(plan.ring) == (m + n % m if n % m else 0) or plan is bound
                assert faults_of(bound, of) <= faults_of(placement(n, m, domains=of), of), (n, m, of, together)
                apart = sum(len({together[h] for h in free.holders(v)}) > 1 for v in range(n))
                wholly = sum(together.count(label) // m * m for label in set(together))
                assert apart <= n - wholly + (m if n % m or n - wholly else 0), (n, m, together)


def test_copies_held_alike_in_one_domain_count_once() -> None:
    racks = ["a", "a", "a", "b", "b", "b"]
    plan = placement(6, 2, domains=racks, alike=["x", "x", "x", "y", "y", "y"])
    assert repeats(plan, racks) == []
    assert sum(len(plan.sends_to(v)) for v in range(6)) == 2
    # With one domain there is nothing to gain from sending.
    plan = placement(6, 2, domains=["a"] * 6, alike=["x", "x", "x", "y", "y", "y"])
    assert sum(len(plan.sends_to(v)) for v in range(6)) == 0 and plan.unavoided


def test_holders_of_shared_shards_span_as_many_domains_as_the_load_allows() -> None:
    fell_short = shared = 0
    for n, m, racks in CASES:
        for spread in range(1, n + 1, 2):
            alike = [f"x{node * spread // n}" for node in range(n)]
            plan = placement(n, m, domains=racks, alike=alike)
            if plan.alike:
                shared += 1
                assert all(len(plan.holders(v)) >= m for v in range(n))
                spreadable = max(map(racks.count, racks)) <= n // m
                assert max(len(plan.receives_from(v)) for v in range(n)) <= (m if spreadable else m + 1)
                short = sum(len({racks[h] for h in plan.holders(v)}) < m for v in range(n))
                assert bool(short) == bool(plan.unavoided)
                fell_short += bool(short) and spreadable
            # Whoever is in a group of several has traffic in it: process groups wait for all their members.
            for group in plan.groups:
                if len(group) > 1:
                    assert all(plan.sends_to(v) or plan.receives_from(v) for v in group)
    assert fell_short == 0 and shared > 500


def faults(plan: Placement, racks: list[str], parallel: list[str]) -> tuple[int, int, int]:
    """Shards with all copies in one rack; then how little the copies spread over racks, over parallel groups."""
    spans, groups = ([len({of[h] for h in plan.holders(v)}) for v in range(plan.num_nodes)] for of in (racks, parallel))
    return spans.count(1), -sum(spans), -sum(groups)


def test_exchanges_for_parallel_groups_cost_no_domain() -> None:
    better = 0
    for n, m, racks in CASES:
        for parts in range(2, n if n <= 7 else 0):
            parallel = [f"p{node % parts}" for node in range(n)]
            plan = placement(n, m, domains=racks, parallel=parallel)
            sound(plan)
            before, after = (faults(p, racks, parallel) for p in (placement(n, m, domains=racks), plan))
            assert after <= before, (n, m, racks, parallel)
            better += after < before
    assert better > 20


def test_shared_shards_avoid_parallel_groups_and_spread_the_load() -> None:
    # Pairs; a third copy each. The near nodes are in the owner's pipeline, those after them are not.
    pairs = [f"x{node // 2}" for node in range(8)]
    free = placement(8, 4, alike=pairs)
    assert {len(free.receives_from(v)) for v in range(8)} == {1}
    four = placement(6, 3, alike=["x", "x", "y", "y", "y", "y"])
    assert sum(len(four.sends_to(v)) for v in range(6)) == 1
    pipelines = ["p", "p", "p", "q", "q", "q"]
    plan = placement(6, 3, alike=["x", "x", "y", "z", "z", None], parallel=pipelines)
    assert all(pipelines[h] != pipelines[0] for h in plan.sends_to(0) + plan.sends_to(1))


def test_labels_for_another_number_of_nodes_are_refused() -> None:
    for name in ("domains", "parallel", "alike", "together"):
        with pytest.raises(ValueError, match=f"{name}: 3 labels for 4 nodes"):
            placement(4, 2, **{name: ["a", "b", "c"]})  # type: ignore[arg-type]
