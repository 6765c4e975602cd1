"""The odds that every shard has a copy left in host memory, when k nodes are lost at once (paper, section 4). Pure.

Probabilities are exact fractions: of all sets of k nodes (or whole failure domains), each as likely as the other, the
part that leaves every shard a copy. `N` = nodes, `m` = copies of a shard, the local one included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from fractions import Fraction
from math import comb

from gemini_run.plan.counting import components, group_ways, power, product, ring_ways, ways_of_sets
from gemini_run.plan.placement import Placement


def group_recovery(num_nodes: int, replicas: int, lost: int) -> Fraction:
    """Group placement, m divides N: sum_{j=0}^{k//m} (-1)^j C(N/m, j) C(N - j*m, k - j*m) / C(N, k).

    The paper prints the first two terms (Corollary 1), which are exact for k < 2m.
    Raises: ValueError unless m divides N and 0 <= k <= N.
    """
    _check(num_nodes, replicas, lost)
    if num_nodes % replicas:
        raise ValueError(f"group placement: {replicas} does not divide {num_nodes} nodes")
    return Fraction(group_ways(num_nodes // replicas, replicas, lost)[lost], comb(num_nodes, lost))


def ring_recovery(num_nodes: int, replicas: int, lost: int) -> Fraction:
    """One ring of all nodes, each sending to its next m-1: unrecoverable iff m consecutive nodes are lost.

    Raises: ValueError unless 1 <= m <= N and 0 <= k <= N.
    """
    _check(num_nodes, replicas, lost)
    return Fraction(ring_ways(num_nodes, replicas, lost)[lost], comb(num_nodes, lost))


def mixed_recovery(num_nodes: int, replicas: int, lost: int) -> Fraction:
    """Algorithm 1: N//m - 1 groups and a ring of m + N % m nodes; group placement where m divides N.

    Losses split between the two parts: sum_i ring(i) groups(k - i).
    Raises: ValueError unless 1 <= m <= N and 0 <= k <= N.
    """
    _check(num_nodes, replicas, lost)
    whole, rest = divmod(num_nodes, replicas)
    if not rest:
        return group_recovery(num_nodes, replicas, lost)
    ways = product(group_ways(whole - 1, replicas, lost), ring_ways(replicas + rest, replicas, lost))
    return Fraction(ways[lost], comb(num_nodes, lost))


def corollary_bound(num_nodes: int, replicas: int, lost: int) -> Fraction:
    """The paper's Corollary 1 for group placement: max(0, 1 - N*C(N-m, k-m) / (m*C(N, k))), and 1 for k < m.

    A lower bound, exact for k < 2m. The paper plots the same union bound with N holder sets for a ring.
    """
    return _union_bound(num_nodes, replicas, lost, Fraction(num_nodes, replicas))


def ring_bound(num_nodes: int, replicas: int, lost: int) -> Fraction:
    """The union bound for a ring (N windows of m nodes), as the paper plots it; exact for k <= m < N."""
    return _union_bound(num_nodes, replicas, lost, Fraction(num_nodes))


def _union_bound(num_nodes: int, replicas: int, lost: int, sets: Fraction) -> Fraction:
    _check(num_nodes, replicas, lost)
    if lost < replicas:
        return Fraction(1)
    fatal = sets * comb(num_nodes - replicas, lost - replicas) / comb(num_nodes, lost)
    return max(Fraction(0), 1 - fatal)


def upper_bound(num_nodes: int, replicas: int) -> Fraction:
    """What no placement exceeds at k = m: every node is in some holder set, so there are at least ceil(N/m)."""
    _check(num_nodes, replicas, replicas)
    return 1 - Fraction(-(-num_nodes // replicas), comb(num_nodes, replicas))


def theorem_gap(num_nodes: int, replicas: int) -> Fraction:
    """By how much mixed placement misses `upper_bound` at k = m: (m + q - 2) / C(N, m), q = N % m; 0 for q = 0.

    Theorem 1 states < (2m - 3)/C(N, m). Derived here: q <= m - 1 gives <=, and N = 5, m = 2 attains it. For N < 2m
    the ring is the whole job and holds the same.
    """
    _check(num_nodes, replicas, replicas)
    rest = num_nodes % replicas
    return Fraction(replicas + rest - 2, comb(num_nodes, replicas)) if rest else Fraction(0)


def recovery_probability(plan: Placement, most: int) -> list[Fraction]:
    """Of any placement: the probability for k = 0..`most` lost nodes, at index k.

    Raises: ValueError unless 0 <= most <= N.
    """
    nodes = plan.num_nodes
    if not 0 <= most <= nodes:
        raise ValueError(f"{most} of {nodes} nodes cannot be lost")
    if plan.sends is not None or plan.alike:
        order = [node for group in plan.groups for node in group]
        ways = _ways(order, [plan.holders(node) for node in range(nodes)], most)
    else:
        groups = (nodes - len(plan.ring)) // plan.replicas
        ways = group_ways(groups, plan.replicas, most)
        if plan.ring:
            ways = product(ways, ring_ways(len(plan.ring), plan.replicas, most))
    return [Fraction(count, comb(nodes, k)) for k, count in enumerate(ways)]


def domain_recovery(plan: Placement, domains: Sequence[Hashable | None], most: int) -> list[Fraction]:
    """The probability for d = 0..`most` whole failure domains lost, at index d; every set of d domains as likely.

    Args:
        domains: failure domain of each node; None = one of its own.

    Raises: ValueError unless there is a label for each node and 0 <= most <= number of domains.
    """
    if len(domains) != plan.num_nodes:
        raise ValueError(f"domains: {len(domains)} labels for {plan.num_nodes} nodes")
    number: dict[Hashable, int] = {}
    where = [
        number.setdefault((node,) if label is None else (label, "label"), len(number))
        for node, label in enumerate(domains)
    ]
    if not 0 <= most <= len(number):
        raise ValueError(f"{most} of {len(number)} failure domains cannot be lost")
    sets = {frozenset(where[holder] for holder in plan.holders(node)) for node in range(plan.num_nodes)}
    ways = _ways(range(len(number)), sets, most)
    return [Fraction(count, comb(len(number), d)) for d, count in enumerate(ways)]


def _ways(order: Sequence[int], sets: Collection[Collection[int]], most: int) -> list[int]:
    """Parts that share no holder set are counted apart, and those that look alike once."""
    shapes: Counter[tuple[int, frozenset[frozenset[int]]]] = Counter()
    for nodes, inside in components(order, sets):
        place = {node: index for index, node in enumerate(nodes)}
        shapes[len(nodes), frozenset(frozenset(place[node] for node in members) for members in inside)] += 1
    ways = [1] + [0] * most
    for (size, shape), count in shapes.items():
        ways = product(ways, power(ways_of_sets(range(size), shape, most), count))
    return ways


def _check(num_nodes: int, replicas: int, lost: int) -> None:
    if not 1 <= replicas <= num_nodes:
        raise ValueError(f"{replicas} replicas on {num_nodes} nodes: from 1 up to the number of nodes")
    if not 0 <= lost <= num_nodes:
        raise ValueError(f"{lost} of {num_nodes} nodes cannot be lost")
