"""The order of nodes that puts those which hold the same tensors into one group of Algorithm 1. Pure.

Data parallelism makes such nodes, where a model is spread over several (HSDP, pipelines, tensor parallelism beside it).
In one group each finds in its own slots what the others would send, so that hardly more than checksums travel (compare
Just-In-Time Checkpointing, Gupta et al., EuroSys 2024); and as nodes with the same part of a model are never in one
model-parallel group, the copies of a shard lie outside its owner's (compare ByteRobust, Wan et al., SOSP 2025). Each
still sends what is its own (generators, data position): a copy is whatever a rank can be restored from to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemini_run.plan.domains import Domains, arrange, faults


def gathered(where: Domains, replicas: int, classes: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """Order of the nodes and length of the ring at its end, as `arrange`.

    Of each class as many groups of `replicas` nodes are made as have no failure domain twice; what is left over is
    arranged as without classes, with a class's members side by side. Sizes of groups and ring are Algorithm 1's. Where
    that put more copies into one domain than `arrange`, its order is kept.

    Args:
        classes: every node once; members of a class hold the same.
    """
    plain = arrange(where, replicas)
    if replicas < 2 or not 1 < len(classes) < where.num_nodes:  # all hold the same, or nobody what another holds
        return plain
    groups: list[list[int]] = []
    rest: list[int] = []
    for nodes in classes:
        made, left = _groups_of(where, replicas, nodes)
        groups += made
        rest += left
    if 0 < len(rest) < replicas and groups:
        rest = groups.pop() + rest
    order, ring = [node for group in sorted(groups) for node in group], 0
    if rest:
        among, ring = arrange(_of(where, rest), replicas)
        order += [rest[index] for index in among]
    found, before = faults(where, order, replicas, ring), faults(where, plain[0], replicas, plain[1])
    return (order, ring) if found[:2] <= before[:2] else plain


def _of(where: Domains, nodes: Sequence[int]) -> Domains:
    """`where`, of these nodes alone, numbered in this order."""

    def chosen(labels: Sequence[str | None] | None) -> list[str | None] | None:
        return None if labels is None else [labels[node] for node in nodes]

    return Domains(len(nodes), chosen(where.domains), chosen(where.parallel))


def _groups_of(where: Domains, replicas: int, nodes: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Groups without a domain twice, and the nodes left over."""
    columns: dict[object, list[int]] = {}
    for node in sorted(nodes):
        columns.setdefault(where.domain(node), []).append(node)
    left: list[int] = []
    for count in range(len(nodes) // replicas, 0, -1):
        # A domain with more nodes than there are groups would be twice in one.
        while _size(columns) > count * replicas or max(map(len, columns.values())) > count:
            left.append(max(columns.values(), key=lambda column: (len(column), column)).pop())
        if _size(columns) == count * replicas:
            chosen = sorted(node for column in columns.values() for node in column)
            order = [chosen[index] for index in arrange(_of(where, chosen), replicas)[0]]
            return [order[at : at + replicas] for at in range(0, len(order), replicas)], sorted(left)
    return [], sorted(nodes)


def _size(columns: Mapping[object, Sequence[int]]) -> int:
    return sum(map(len, columns.values()))
