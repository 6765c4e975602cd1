"""How many sets of k lost nodes leave every shard a copy. Exact, in whole numbers. Pure.

A *holder set* is the set of nodes with a copy of one shard; a loss is *fatal* iff it contains a holder set. All
functions return lists `ways` with ways[k] = number of k-sets of lost nodes that are not fatal, k = 0..most; beyond the
number of nodes it is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from math import comb


def group_ways(groups: int, size: int, most: int) -> list[int]:
    """`groups` separate groups of `size` nodes, each fatal when lost as a whole.

    Inclusion-exclusion over the groups that are lost: sum_j (-1)^j C(groups, j) C(nodes - j*size, k - j*size).
    """
    nodes = groups * size
    ways = []
    for k in range(most + 1):
        terms = range(min(groups, k // size) + 1)
        ways.append(sum((-1) ** j * comb(groups, j) * comb(nodes - j * size, k - j * size) for j in terms))
    return ways


def ring_ways(nodes: int, run: int, most: int) -> list[int]:
    """A ring of `nodes` >= `run` nodes, fatal when `run` consecutive ones are lost.

    The z = nodes - k that live cut the lost ones into z runs (some empty) of fewer than `run` each: compositions of
    k into z parts of 0..run-1, times nodes/z for the place of the first on the ring.
    """
    if nodes < run:
        raise ValueError(f"a ring of {nodes} nodes has no {run} consecutive ones")
    ways = []
    for k in range(most + 1):
        z = nodes - k
        if z <= 0:
            ways.append(0)
            continue
        parts = sum((-1) ** j * comb(z, j) * comb(k - j * run + z - 1, z - 1) for j in range(min(z, k // run) + 1))
        ways.append(nodes * parts // z)
    return ways


def ways_of_sets(order: Sequence[int], fatal: Iterable[Collection[int]], most: int) -> list[int]:
    """Any holder sets `fatal` among the nodes `order`, by a transfer matrix whose states are built as they occur.

    Nodes are decided one after the other. The state is which holder sets are still open: all their nodes so far are
    lost, and some of their nodes are yet to come. Few states are alive at once where `order` keeps the nodes of a
    set near each other; at worst there is one for each set of at most `most` lost nodes.
    """
    place = {node: index for index, node in enumerate(order)}
    sets = _minimal({frozenset(place[node] for node in nodes) for nodes in fatal})
    opened: list[int] = [0] * len(order)  # bit masks: sets whose first, any, last node this is
    member: list[int] = [0] * len(order)
    closed: list[int] = [0] * len(order)
    for bit, nodes in enumerate(sets):
        opened[min(nodes)] |= 1 << bit
        closed[max(nodes)] |= 1 << bit
        for node in nodes:
            member[node] |= 1 << bit
    states: dict[int, list[int]] = {0: [1] + [0] * most}
    for node in range(len(order)):
        following: dict[int, list[int]] = {}
        for state, ways in states.items():
            possible = state | opened[node]
            _add(following, possible & ~member[node], ways, 0)
            if not possible & closed[node]:
                _add(following, possible, ways, 1)
        states = following
    return [sum(ways[k] for ways in states.values()) for k in range(most + 1)]


def _add(states: dict[int, list[int]], state: int, ways: Sequence[int], lost: int) -> None:
    shifted = [0] * lost + list(ways[: len(ways) - lost])
    if not any(shifted):
        return
    known = states.get(state)
    states[state] = shifted if known is None else [a + b for a, b in zip(known, shifted, strict=True)]


def _minimal(sets: Collection[frozenset[int]]) -> list[frozenset[int]]:
    """Without those that contain another: they are fatal already. In a fixed order."""
    ordered = sorted(sets, key=lambda nodes: (len(nodes), sorted(nodes)))
    with_node: dict[int, list[frozenset[int]]] = {}
    kept: list[frozenset[int]] = []
    for nodes in ordered:
        if not any(other <= nodes for node in nodes for other in with_node.get(node, ())):
            kept.append(nodes)
            with_node.setdefault(min(nodes), []).append(nodes)
    return kept


def components(
    nodes: Iterable[int], sets: Iterable[Collection[int]]
) -> list[tuple[tuple[int, ...], list[frozenset[int]]]]:
    """The nodes split into parts that share no set, with the sets of each part.

    The nodes of a part come breadth first from one in few sets, as the transfer matrix likes them: those of a set
    near each other, also where a chain or a ring of sets runs through them.
    """
    distinct = {frozenset(members) for members in sets}
    of_node: dict[int, list[frozenset[int]]] = {node: [] for node in nodes}
    for members in sorted(distinct, key=sorted):
        for node in members:
            of_node[node].append(members)
    parts: list[tuple[tuple[int, ...], list[frozenset[int]]]] = []
    seen: set[int] = set()
    for first in sorted(of_node, key=lambda node: len(of_node[node])):
        if first in seen:
            continue
        order, met = [first], dict.fromkeys(of_node[first])
        seen.add(first)
        for node in order:  # grows as it is walked
            for members in of_node[node]:
                met[members] = None
                fresh = sorted(members - seen)
                order += fresh
                seen.update(fresh)
        parts.append((tuple(order), list(met)))
    return parts


def product(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Ways of two separate parts together, up to the length of `first`."""
    most = len(first) - 1
    ways = [0] * (most + 1)
    for (i, a), (j, b) in itertools.product(enumerate(first), enumerate(second)):
        if a and b and i + j <= most:
            ways[i + j] += a * b
    return ways


def power(ways: Sequence[int], count: int) -> list[int]:
    """Ways of `count` parts that are like each other."""
    result, square = [1] + [0] * (len(ways) - 1), list(ways)
    while count:
        if count & 1:
            result = product(result, square)
        count >>= 1
        if count:
            square = product(square, square)
    return result
