"""Odds of recovery: against brute force over all small jobs, and the paper's own figures."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from fractions import Fraction
from math import comb

import pytest

from gemini_run.plan.counting import ring_ways
from gemini_run.plan.placement import Placement, placement
from gemini_run.plan.probability import (
    corollary_bound,
    domain_recovery,
    group_recovery,
    mixed_recovery,
    recovery_probability,
    ring_bound,
    ring_recovery,
    theorem_gap,
    upper_bound,
)

SMALL = [(n, m) for n in range(1, 13) for m in range(1, n + 1)]


def brute(num_nodes: int, sets: Sequence[Sequence[int]]) -> list[Fraction]:
    """Every set of lost nodes, looked at one by one."""
    masks = {sum(1 << node for node in nodes) for nodes in map(set, sets)}
    good = [0] * (num_nodes + 1)
    for lost in range(1 << num_nodes):
        good[lost.bit_count()] += all(mask & ~lost for mask in masks)
    return [Fraction(count, comb(num_nodes, k)) for k, count in enumerate(good)]


@functools.cache
def of_algorithm_1(n: int, m: int) -> list[Fraction]:
    plan = placement(n, m)
    return brute(n, [plan.holders(node) for node in range(n)])


def test_every_small_job() -> None:
    for n, m in SMALL:
        expected = of_algorithm_1(n, m)
        assert recovery_probability(placement(n, m), n) == expected, (n, m)
        assert [mixed_recovery(n, m, k) for k in range(n + 1)] == expected, (n, m)
        if n % m == 0:
            assert [group_recovery(n, m, k) for k in range(n + 1)] == expected, (n, m)


def test_every_small_ring() -> None:
    for n, m in SMALL:
        expected = brute(n, [[(i + s) % n for s in range(m)] for i in range(n)])
        assert [ring_recovery(n, m, k) for k in range(n + 1)] == expected, (n, m)


def test_placements_that_no_formula_covers() -> None:
    """Explicit sends, shards held alike, rings made longer by domains: the transfer matrix against brute force."""
    for n, m in [(n, m) for n, m in SMALL if n <= 10 and m > 1]:
        for spread in range(1, n + 1):
            labels = [f"x{node % spread}" for node in range(n)]
            rows = [f"r{node // 3}" for node in range(n)]
            plans = (placement(n, m, alike=labels), placement(n, m, alike=labels, domains=rows),
                     placement(n, m, domains=rows))  # fmt: skip
            for plan in plans:
                expected = brute(n, [plan.holders(node) for node in range(n)])
                assert recovery_probability(plan, n) == expected, (n, m, plan)


def by_domains(plan: Placement, domains: list[str]) -> list[Fraction]:
    names = sorted(set(domains))
    result = []
    for count in range(len(names) + 1):
        good = 0
        for lost in itertools.combinations(names, count):
            good += all(any(domains[h] not in lost for h in plan.holders(v)) for v in range(plan.num_nodes))
        result.append(Fraction(good, comb(len(names), count)))
    return result


def test_loss_of_whole_domains() -> None:
    for n, m in [(n, m) for n, m in SMALL if n <= 9 and m > 1]:
        for racks in range(1, n + 1):
            domains = [f"r{node * racks // n}" for node in range(n)]
            for plan in (placement(n, m), placement(n, m, domains=domains)):
                assert domain_recovery(plan, domains, racks) == by_domains(plan, domains), (n, m, racks)


def test_domains_known_turn_a_sure_loss_into_a_sure_recovery() -> None:
    racks = [f"r{node // 4}" for node in range(16)]
    assert domain_recovery(placement(16, 2), racks, 1) == [1, 0]
    spread = domain_recovery(placement(16, 2, domains=racks), racks, 4)
    assert spread[:2] == [1, 1]
    assert spread[2] == Fraction(2, 3)  # two pairs of racks hold each other's copies: 2 of the 6 pairs are fatal


def test_nodes_without_a_domain_are_domains_of_their_own() -> None:
    plan = placement(6, 2)
    assert domain_recovery(plan, [None] * 6, 6) == recovery_probability(plan, 6)


# --- the paper's figures (section 4) ------------------------------------------------------------------


def test_the_papers_percentages() -> None:
    assert [f"{float(group_recovery(16, 2, k)):.1%}" for k in (1, 2, 3, 4)] == ["100.0%", "93.3%", "80.0%", "61.5%"]
    assert f"{float(corollary_bound(16, 2, 4)):.0%}" == "60%"
    assert [f"{float(ring_recovery(16, 2, k)):.1%}" for k in (2, 3)] == ["86.7%", "62.9%"]
    assert f"{float(ring_bound(16, 2, 3)):.1%}" == "60.0%"  # what the paper plots


def test_corollary_1_is_exact_below_2m_and_a_bound_beyond() -> None:
    for n, m in [(n, m) for n, m in SMALL if n % m == 0]:
        for k in range(n + 1):
            bound, exact = corollary_bound(n, m, k), of_algorithm_1(n, m)[k]
            assert bound == exact if k < 2 * m else bound <= exact, (n, m, k)


def test_the_rings_bound() -> None:
    for n, m in SMALL:
        exact = [ring_recovery(n, m, k) for k in range(n + 1)]
        assert all(ring_bound(n, m, k) <= exact[k] for k in range(n + 1))
        if m < n:
            assert [ring_bound(n, m, k) for k in range(m + 1)] == exact[: m + 1]


def test_theorem_1() -> None:
    """Group placement is best at k = m; mixed placement misses the best by no more than (2m - 3)/C(N, m)."""
    for n, m in SMALL:
        gap = upper_bound(n, m) - of_algorithm_1(n, m)[m]
        assert gap == theorem_gap(n, m), (n, m)
        if n % m:
            assert 0 <= gap <= Fraction(2 * m - 3, comb(n, m))
    assert theorem_gap(5, 2) == Fraction(2 * 2 - 3, comb(5, 2))  # the printed strict inequality does not hold here


def test_no_placement_beats_the_upper_bound() -> None:
    """All ways to choose one other holder for each of five nodes."""
    best = max(
        brute(5, list(enumerate(targets)))[2]
        for targets in itertools.product(range(5), repeat=5)
        if all(node != target for node, target in enumerate(targets))
    )
    assert best == upper_bound(5, 2) == Fraction(7, 10)


@pytest.mark.parametrize("call", [
    lambda: group_recovery(5, 2, 1), lambda: group_recovery(4, 5, 1), lambda: ring_recovery(4, 2, 5),
    lambda: mixed_recovery(4, 0, 1), lambda: corollary_bound(4, 2, -1), lambda: ring_ways(2, 3, 1),
    lambda: recovery_probability(placement(4, 2), 5), lambda: domain_recovery(placement(4, 2), ["a"] * 4, 2),
    lambda: domain_recovery(placement(4, 2), ["a"] * 3, 1),
])  # fmt: skip
def test_impossible_arguments_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match=r"nodes|domains"):
        call()  # type: ignore[operator]
