"""Where the replicas of each node's shards go: Algorithm 1 of the GEMINI paper (section 4). Pure."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Placement:
    """Who keeps copies of whose shards. Node ranks 0..num_nodes-1 throughout.

    Attributes:
        num_nodes: N of the paper.
        replicas: m of the paper, copies of a shard including the local one.
        groups: the nodes that talk to each other, ascending; each node is in exactly one. All but a ring are
            groups of exactly `replicas` nodes in which everybody sends to everybody.
        ring: the last entry of `groups` where its nodes form a ring, else empty.
    """

    num_nodes: int
    replicas: int
    groups: tuple[tuple[int, ...], ...]
    ring: tuple[int, ...] = ()

    def sends_to(self, node: int) -> tuple[int, ...]:
        """The `replicas - 1` nodes that keep a copy of `node`'s shards, nearest first."""
        return self._around(node, 1)

    def receives_from(self, node: int) -> tuple[int, ...]:
        """The `replicas - 1` nodes whose shards `node` keeps a copy of, nearest first."""
        return self._around(node, -1)

    def holders(self, node: int) -> tuple[int, ...]:
        """Every node with a copy of `node`'s shards, itself first."""
        return (node, *self.sends_to(node))

    def group_of(self, node: int) -> tuple[int, ...]:
        """The entry of `groups` that `node` is in. Raises: ValueError for an unknown node."""
        for group in self.groups:
            if node in group:
                return group
        raise ValueError(f"no node {node} in a placement of {self.num_nodes} nodes")

    def _around(self, node: int, direction: int) -> tuple[int, ...]:
        # In a group of m nodes the next m-1 around are all the others: one rule serves group and ring.
        group = self.group_of(node)
        here = group.index(node)
        return tuple(group[(here + direction * step) % len(group)] for step in range(1, self.replicas))


def placement(num_nodes: int, replicas: int) -> Placement:
    """Algorithm 1 (paper, section 4) for N = `num_nodes` and m = `replicas`.

    Where m divides N: group placement, N/m groups of m. Otherwise mixed placement: group placement for the
    first N//m - 1 groups, and the last m + N % m nodes form a ring in which each sends to its next m - 1.

    Raises:
        ValueError: not 1 <= replicas <= num_nodes (the paper leaves it undefined).
    """
    if not 1 <= replicas <= num_nodes:
        raise ValueError(f"{replicas} replicas on {num_nodes} nodes: from 1 up to the number of nodes")
    whole = num_nodes // replicas if num_nodes % replicas == 0 else num_nodes // replicas - 1
    groups = [tuple(range(replicas * i, replicas * (i + 1))) for i in range(whole)]
    ring = tuple(range(replicas * whole, num_nodes))
    if ring:
        groups.append(ring)
    return Placement(num_nodes, replicas, tuple(groups), ring)
