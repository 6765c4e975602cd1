"""The order in which Algorithm 1 takes the nodes, so that the copies of a shard lie in different failure domains. Pure.

Derivation (ours; the paper takes losses as uniform over nodes). N = m*g + q nodes, 0 <= q < m; c_i nodes in domain i.

- Every node holds copies of m shards, so domain i touches m*c_i of the N holder sets. At most one copy per set and
  domain means m*c_i <= N, that is c_i <= g: necessary under equal load.
- Groups: lay the nodes out domain by domain and deal them to g groups in turn. Nodes of one domain land in different
  groups as long as c_i <= g.
- A ring of L nodes whose m-windows never repeat a domain: L = m*j + q, and each domain has at most j nodes in it.
  Deal its nodes to j rows in turn, the domains that have exactly j nodes first, and join the rows. Two nodes of one
  domain are then at least one row, which is >= m nodes, apart.
- The shortest ring: the least j with sum(min(j, c_i)) >= m*j + q. That sum less m*j is concave in j, 0 at j = 0 and q
  at j = g, so j = g always works. What the ring must take so that the rest fits in g - j groups always fits in it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice


@dataclasses.dataclass(frozen=True)
class Domains:
    """What fails together, by node: labels as `placement` takes them (None: alone)."""

    num_nodes: int
    domains: Sequence[str | None] | None = None
    parallel: Sequence[str | None] | None = None

    def domain(self, node: int) -> object:
        return _label(self.domains, node)

    def parallel_group(self, node: int) -> object:
        return _label(self.parallel, node)


def _label(labels: Sequence[str | None] | None, node: int) -> object:
    label = None if labels is None else labels[node]
    return node if label is None else label


def arrange(where: Domains, replicas: int) -> tuple[list[int], int]:
    """The nodes in the order that Algorithm 1 is to take them, and the length of the ring at its end (0: none).

    The natural order stays where no other has fewer faults.
    """
    nodes, m = where.num_nodes, replicas
    g, q = divmod(nodes, m)
    plain = list(range(nodes))
    shortest = m + q if q else 0
    found = faults(where, plain, m, shortest)
    if m == 1 or found == _NONE:
        return plain, shortest
    candidates = [(plain, shortest)]
    parallel = [where.parallel_group(node) for node in plain]
    if where.parallel is not None:
        candidates.append(_dealt(parallel, m, longest=1))
    if where.domains is not None and any(found[:2]):
        domains = [where.domain(node) for node in plain]
        candidates.append(_dealt(domains, m, longest=g))
        if where.parallel is not None:
            candidates.append(_dealt(domains, m, longest=g, within=parallel))
    order, ring = min(candidates, key=lambda c: faults(where, c[0], m, c[1]))  # the first of equals
    if where.domains is not None and where.parallel is not None:
        order = _exchanged(where, order, m, ring)
    return order, ring


def colliding(where: Domains, holders: Iterable[Sequence[int]], replicas: int) -> tuple[str, ...]:
    """One sentence for each kind of thing that the holder sets do not avoid; empty where they avoid all.

    Args:
        holders: per shard the nodes with a copy, its owner first. More than `replicas` of them are never a fault.
    """
    sets = [tuple(nodes) for nodes in holders]
    said = []
    if where.domains is not None:
        spans = [len({where.domain(node) for node in nodes}) for nodes in sets]
        short, alone = sum(span < replicas for span in spans), spans.count(1) if replicas > 1 else 0
        if short:
            counts = Counter(where.domain(node) for node in range(where.num_nodes))
            largest, size = counts.most_common(1)[0]
            text = f"{short} of {len(sets)} nodes have two or more of their {replicas} copies in one failure domain"
            text += f" ({alone} have all there)" if alone else ""
            text += f": {len(counts)} domains, and {largest} alone has {size} of the {where.num_nodes} nodes"
            said.append(text)
    if where.parallel is not None:
        own = sum(any(where.parallel_group(n) == where.parallel_group(nodes[0]) for n in nodes[1:]) for nodes in sets)
        if own:
            said.append(f"{own} of {len(sets)} nodes have a copy in their own parallel group")
    return tuple(said)


# --- dealing -------------------------------------------------------------------------------------------


def _dealt(
    labels: Sequence[object], m: int, longest: int, within: Sequence[object] | None = None
) -> tuple[list[int], int]:
    """Order and ring length by the derivation above; a ring of at most m * `longest` + q nodes.

    Args:
        within: second labels, which nodes of groups should not share either: each domain's nodes are dealt in the
            order of these, from another one on for each place in a group. A start for `_exchanged`, no guarantee.
    """
    g, q = divmod(len(labels), m)
    nodes_of: dict[object, list[int]] = {}
    for node, label in enumerate(labels):
        nodes_of.setdefault(label, []).append(node)
    columns = sorted(nodes_of.values(), key=lambda nodes: (-len(nodes), nodes))
    if within is not None:
        columns = _turned(columns, within, m, g)
    if not q:
        return _groups(columns, g), 0
    rows = _rows([len(nodes) for nodes in columns], m, q, g if len(columns[0]) <= g and longest > 1 else 1)
    taken = _taken([len(nodes) for nodes in columns], rows, g, m * rows + q)
    # From the end of each: what stays keeps the lower ranks.
    ring_columns = sorted((c[len(c) - t :] for c, t in zip(columns, taken, strict=True) if t), key=lambda c: -len(c))
    rest = sorted((c[: len(c) - t] for c, t in zip(columns, taken, strict=True)), key=lambda c: -len(c))
    if len(ring_columns[0]) > rows:  # cannot be kept apart: as far as it goes
        places = ((index + 0.5) / len(c) for c in ring_columns for index in range(len(c)))
        sequence = [node for _, node in sorted(zip(places, (n for c in ring_columns for n in c), strict=True))]
        ring = sequence
    else:
        sequence = [node for column in ring_columns for node in column]
        ring = [node for row in range(rows) for node in sequence[row::rows]]
    return _groups(rest, g - rows) + ring, len(ring)


def _groups(columns: Sequence[Sequence[int]], count: int) -> list[int]:
    sequence = [node for column in columns for node in column]
    groups = sorted(sorted(sequence[row::count]) for row in range(count))
    return [node for group in groups for node in group]


def _turned(columns: Sequence[list[int]], within: Sequence[object], m: int, g: int) -> list[list[int]]:
    first = {label: node for node, label in reversed(list(enumerate(within)))}
    turned, dealt = [], 0
    for column in columns:
        ordered = sorted(column, key=lambda node: (first[within[node]], node))
        start = dealt // g * len(column) // m
        turned.append(ordered[start:] + ordered[:start])
        dealt += len(column)
    return turned


def _rows(sizes: Sequence[int], m: int, q: int, longest: int) -> int:
    """The least j with sum(min(j, c_i)) >= m*j + q, or 1 where there is none up to `longest`."""
    for rows in range(1, longest + 1):
        if sum(min(rows, size) for size in sizes) >= m * rows + q:
            return rows
    return 1


def _taken(sizes: Sequence[int], rows: int, g: int, length: int) -> list[int]:
    """How many nodes of each domain go into the ring: what the groups cannot take, then of those with most left."""
    taken = [min(max(0, size - (g - rows)), rows) for size in sizes]
    for cap in (rows, max(sizes)):  # the second only where the first does not fill the ring
        for index in sorted(range(len(sizes)), key=lambda i: taken[i] - sizes[i]):
            more = min(min(cap, sizes[index]) - taken[index], length - sum(taken))
            taken[index] += max(0, more)
    return taken


_EXCHANGES = 30_000  # tried at most
_ANYWHERE = 64  # of them for one node, with nodes of other domains


def _exchanged(where: Domains, order: Sequence[int], m: int, ring_length: int) -> list[int]:
    """`order` with pairs of nodes exchanged as long as that takes copies out of the owner's parallel group and puts
    none into one domain. First with nodes of the same domain, which cannot do that, then with some others."""
    order = list(order)
    cut = len(order) - ring_length
    tried = 0
    of_domain: dict[object, list[int]] = {}  # positions, whose domains stay as long as these are exchanged
    for position, node in enumerate(order):
        of_domain.setdefault(where.domain(node), []).append(position)

    def faults_at(*positions: int) -> Faults:
        parts = {min(position // m * m, cut) for position in positions}
        found = [faults(where, order[p : p + m] if p < cut else order[cut:], m, 0 if p < cut else ring_length)
                 for p in parts]  # fmt: skip
        return sum(f[0] for f in found), sum(f[1] for f in found), sum(f[2] for f in found)

    def exchange(here: int, candidates: Iterable[int]) -> None:
        nonlocal tried
        for there in candidates:
            if tried >= _EXCHANGES or not faults_at(here)[2]:
                return
            if where.parallel_group(order[here]) == where.parallel_group(order[there]):
                continue
            tried += 1
            before = faults_at(here, there)
            order[here], order[there] = order[there], order[here]
            if faults_at(here, there) >= before:
                order[here], order[there] = order[there], order[here]

    for here in range(len(order)):
        exchange(here, of_domain[where.domain(order[here])])
    for here in range(len(order)):
        others = ((here + step) % len(order) for step in range(1, len(order)))
        group = where.parallel_group(order[here])
        exchange(here, islice((p for p in others if where.parallel_group(order[p]) != group), _ANYWHERE))
    return order


# --- counting ------------------------------------------------------------------------------------------

#: over all shards, the worst first: with all copies in one domain; copies beyond the first in one domain; copies beyond
#: the first in one parallel group
Faults = tuple[int, int, int]
_NONE: Faults = (0, 0, 0)


def faults(where: Domains, order: Sequence[int], m: int, ring_length: int) -> Faults:
    """Of Algorithm 1's placement of the nodes in this order."""
    cut = len(order) - ring_length
    sets = [(order[i : i + m], m) for i in range(0, cut, m)]
    sets += [([order[cut + (i + s) % ring_length] for s in range(m)], 1) for i in range(ring_length)]
    alone = repeated = parallel = 0
    for nodes, shards in sets:
        if where.domains is not None:
            span = len(set(map(where.domain, nodes)))
            alone += shards * (span == 1 < m)
            repeated += shards * (m - span)
        if where.parallel is not None:
            parallel += shards * (m - len(set(map(where.parallel_group, nodes))))
    return alone, repeated, parallel
