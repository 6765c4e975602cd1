"""Who sends to whom where several nodes hold the same shards anyway (data parallelism). Pure.

Just-In-Time Checkpointing (Gupta et al., EuroSys 2024) observed that such nodes are copies already; here they count
towards m, and only what lacks is sent.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from gemini_run.plan.counting import components
from gemini_run.plan.domains import Domains

Nodes = tuple[int, ...]
_LARGEST = 16  # times m: nodes of a cell, beyond which it no longer waits for a rare domain


def classes_of(order: Sequence[int], alike: Sequence[Hashable | None] | None) -> list[Nodes]:
    """Nodes with the same shards, each class and all classes in `order`; a node without a label is one of its own."""
    classes: dict[Hashable, list[int]] = {}
    for node in order:
        label = None if alike is None else alike[node]
        # A tuple for the unlabelled: no label of the caller's equals it.
        classes.setdefault((node,) if label is None else (label, "label"), []).append(node)
    return [tuple(nodes) for nodes in classes.values()]


def share(where: Domains, replicas: int, classes: Sequence[Nodes]) -> tuple[tuple[Nodes, ...], tuple[Nodes, ...]]:
    """Groups of nodes, and per node whom it sends to.

    Classes are gathered into cells with at least `replicas` domains and parallel groups, as far as there are so many.
    A class sends what it lacks within its cell: to nodes that receive fewer than m copies (m - 1 would be the load
    were nothing alike), into domains that hold no copy yet, outside its parallel groups, to the node that receives
    least, to the nearest. The members of a class take turns in sending. A class that lacks nothing stays out unless a
    cell needs its nodes as receivers. Groups are what traffic joins; who has none is a group of one.
    """
    sends: list[list[int]] = [[] for _ in range(where.num_nodes)]
    received = [0] * where.num_nodes
    for cell in _cells(where, replicas, classes):
        nodes = tuple(node for members in cell for node in members)
        for members in cell:
            for turn, target in enumerate(_targets(where, replicas, members, nodes, received)):
                sends[members[turn % len(members)]].append(target)
                received[target] += 1
    traffic = [(node, target) for node, targets in enumerate(sends) for target in targets]
    groups = sorted(tuple(sorted(nodes)) for nodes, _ in components(range(where.num_nodes), traffic))
    return tuple(groups), tuple(map(tuple, sends))


def _cells(where: Domains, replicas: int, classes: Sequence[Nodes]) -> list[list[Nodes]]:
    def span(nodes: Iterable[int]) -> tuple[int, int]:
        nodes = list(nodes)
        return len({where.domain(node) for node in nodes}), len({where.parallel_group(node) for node in nodes})

    domains, parallel = (min(replicas, there) for there in span(range(where.num_nodes)))

    def enough(cell: Sequence[Nodes]) -> bool:
        nodes = [node for members in cell for node in members]
        found = span(nodes)
        return len(nodes) >= replicas and found[0] >= domains and (len(cell) == 1 or found[1] >= parallel)

    short = [members for members in classes if not enough([members])]
    idle = [members for members in classes if enough([members])]
    cells: list[list[Nodes]] = []
    cell: list[Nodes] = []
    for members in short:
        cell.append(members)
        if enough(cell) or sum(map(len, cell)) >= _LARGEST * replicas:
            cells.append(cell)
            cell = []
    if cell and cells:
        cells[-1] += cell
    elif cell:
        while idle and not enough(cell):
            cell.append(idle.pop(0))
        cells.append(cell)
    return cells


def _targets(where: Domains, replicas: int, members: Nodes, cell: Nodes, received: Sequence[int]) -> list[int]:
    """The nodes of the cell that are to get copies of what `members` hold."""
    domains = {where.domain(node) for node in members}
    parallel = {where.parallel_group(node) for node in members}
    start = cell.index(members[-1])
    around = [cell[(start + step) % len(cell)] for step in range(1, len(cell))]
    left = [node for node in around if node not in members]
    targets: list[int] = []
    while len(domains) < replicas and left:
        best = min(
            left,
            key=lambda n: (
                received[n] >= replicas,
                where.domain(n) in domains,
                where.parallel_group(n) in parallel,
                received[n],
            ),
        )
        gains = where.domain(best) not in domains and received[best] < replicas
        if not gains and len(members) + len(targets) >= replicas:
            break
        left.remove(best)
        targets.append(best)
        domains.add(where.domain(best))
        parallel.add(where.parallel_group(best))
    return targets
