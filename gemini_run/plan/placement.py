"""Where the replicas of each node's shards go: Algorithm 1 of the GEMINI paper (section 4), and what the paper leaves
out: failure domains, parallel groups, shards that several nodes hold anyway. Pure.

Algorithm 1 takes the nodes in some order. Failure domains only change the order (plan/domains.py), so what is known of
groups and rings (plan/probability.py) stays true. Only where nodes hold shards alike does each send to fewer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from gemini_run.plan.domains import Domains, arrange, colliding
from gemini_run.plan.sharing import classes_of, share
from gemini_run.plan.together import gathered


@dataclasses.dataclass(frozen=True)
class Placement:
    """Who keeps copies of whose shards. Node ranks 0..num_nodes-1 throughout.

    Attributes:
        num_nodes: N of the paper.
        replicas: m of the paper, copies of a shard including the local one.
        groups: the nodes that talk to each other; each node is in exactly one. All but a ring are groups of exactly
            `replicas` nodes in which everybody sends to everybody, unless `sends` says otherwise.
        ring: the last entry of `groups` where its nodes form a ring (in this order), else empty.
        alike: nodes that hold the same shards anyway; only sets of two or more.
        sends: per node whom it sends to, where that is not the rule of groups and ring (with `alike`).
        unavoided: what could not be had, one sentence each: two copies in one failure domain, or in the owner's own
            parallel group.
    """

    num_nodes: int
    replicas: int
    groups: tuple[tuple[int, ...], ...]
    ring: tuple[int, ...] = ()
    alike: tuple[tuple[int, ...], ...] = ()
    sends: tuple[tuple[int, ...], ...] | None = None
    unavoided: tuple[str, ...] = ()

    def sends_to(self, node: int) -> tuple[int, ...]:
        """The nodes that `node` sends its shards to, nearest first; `replicas - 1` of them without `alike`.

        Raises: ValueError for an unknown node.
        """
        if self.sends is not None:
            self.group_of(node)
            return self.sends[node]
        return self._around(node, 1)

    def receives_from(self, node: int) -> tuple[int, ...]:
        """The nodes that send their shards to `node`, nearest first. Raises: ValueError for an unknown node."""
        if self.sends is not None:
            self.group_of(node)
            return self._receives[node]
        return self._around(node, -1)

    def holders(self, node: int) -> tuple[int, ...]:
        """Every node with a copy of `node`'s shards, itself first. Raises: ValueError for an unknown node."""
        others = tuple(other for other in self._alike_with.get(node, ()) if other != node)
        sent = self.sends_to(node)
        for other in others:
            sent += tuple(to for to in self.sends_to(other) if to not in sent)
        return (node, *others, *sent)

    def group_of(self, node: int) -> tuple[int, ...]:
        """The entry of `groups` that `node` is in. Raises: ValueError for an unknown node."""
        return self.groups[self._place(node)[0]]

    def _around(self, node: int, direction: int) -> tuple[int, ...]:
        # In a group of m nodes the next m-1 around are all the others: one rule serves group and ring.
        index, here = self._place(node)
        group = self.groups[index]
        return tuple(group[(here + direction * step) % len(group)] for step in range(1, self.replicas))

    def _place(self, node: int) -> tuple[int, int]:
        place = self._places.get(node)
        if place is None:
            raise ValueError(f"no node {node} in a placement of {self.num_nodes} nodes")
        return place

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {node: (i, j) for i, group in enumerate(self.groups) for j, node in enumerate(group)}

    @functools.cached_property
    def _alike_with(self) -> dict[int, tuple[int, ...]]:
        return {node: nodes for nodes in self.alike for node in nodes}

    @functools.cached_property
    def _receives(self) -> tuple[tuple[int, ...], ...]:
        received: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, targets in enumerate(self.sends or ()):
            for target in targets:
                received[target].append(node)
        return tuple(map(tuple, received))


def placement(
    num_nodes: int,
    replicas: int,
    *,
    domains: Sequence[str | None] | None = None,
    parallel: Sequence[str | None] | None = None,
    alike: Sequence[str | None] | None = None,
    together: Sequence[int] | None = None,
) -> Placement:
    """Algorithm 1 (paper, section 4) for N = `num_nodes` and m = `replicas`.

    Where m divides N: group placement, N/m groups of m. Otherwise mixed placement: group placement for the
    first N//m - 1 groups, and the last m + N % m nodes form a ring in which each sends to its next m - 1.

    Args:
        domains: failure domain (rack, switch, zone) of each node; None = one of its own. No two copies of a shard lie
            in one domain wherever that is possible with an equal load on all nodes, which is where no domain has more
            than N // m nodes. It may take a ring of more than m + N % m nodes; the shortest that does is taken.
        parallel: parallel group of each node (pipeline stage, tensor-parallel group that is evicted as one); None =
            of its own. Avoided like a domain, but only after domains and never at the price of a longer ring: a
            longer ring lowers the odds of every other failure.
        alike: nodes with the same label hold the same shards anyway (data parallelism); None = nobody else does. They
            are copies (those in one domain count once) and only what lacks to m is sent, by the first of them.
        together: nodes with the same label hold the same tensors, but not all of each other's state: they are put into
            one group where domains allow it (plan/together.py), and each sends to m - 1 others as ever. As jobs do it.

    Raises:
        ValueError: not 1 <= replicas <= num_nodes (the paper leaves it undefined), or a label list of another length.
    """
    if not 1 <= replicas <= num_nodes:
        raise ValueError(f"{replicas} replicas on {num_nodes} nodes: from 1 up to the number of nodes")
    for name, labels in (("domains", domains), ("parallel", parallel), ("alike", alike), ("together", together)):
        if labels is not None and len(labels) != num_nodes:
            raise ValueError(f"{name}: {len(labels)} labels for {num_nodes} nodes")
    where = Domains(num_nodes, domains, parallel)
    if together is None:
        order, ring_length = arrange(where, replicas)
    else:
        order, ring_length = gathered(where, replicas, classes_of(range(num_nodes), together))
    classes = classes_of(order, alike)
    if any(len(nodes) > 1 for nodes in classes):
        shared, sends = share(where, replicas, classes)
        same = tuple(sorted(tuple(sorted(nodes)) for nodes in classes if len(nodes) > 1))
        return _with_report(Placement(num_nodes, replicas, shared, (), same, sends), where)
    cut = num_nodes - ring_length
    groups = [tuple(order[i : i + replicas]) for i in range(0, cut, replicas)]
    ring = tuple(order[cut:])
    if ring:
        groups.append(ring)
    return _with_report(Placement(num_nodes, replicas, tuple(groups), ring), where)


def _with_report(plan: Placement, where: Domains) -> Placement:
    holders = [plan.holders(node) for node in range(plan.num_nodes)]
    return dataclasses.replace(plan, unavoided=colliding(where, holders, plan.replicas))
