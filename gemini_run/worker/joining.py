"""How a rank joins its checkpoint process group: after all have said, by checksums, what they hold alike.

Runs on the commit thread, at the first snapshot of a round (the one that it goes on from, where there is one).
"""

from __future__ import annotations

import json

import torch.distributed as dist
import xxhash

from gemini_run.memory.slots import Slot
from gemini_run.peers.group import Peers, form
from gemini_run.plan.manifest import Manifest
from gemini_run.plan.placement import Placement, placement
from gemini_run.plan.share import MIN_BYTES
from gemini_run.wire import KEY_TOGETHER, WorkerContext, key_group, key_holds
from gemini_run.worker.waiting import PATIENCE, wait_for

COMPARED = 0.9  #: of a rank's bytes, the largest tensors first: small ones (statistics, counters) may differ


class Joining:
    """One rank's way into its checkpoint process group.

    Attributes:
        placement: of all nodes in this round; None before `join` has learnt who holds what.
    """

    def __init__(self, context: WorkerContext, *, rank: int, local_rank: int, local_world_size: int) -> None:
        self._context = context
        self._rank = rank
        self._local_rank = local_rank
        self._local_world_size = local_world_size
        self.placement: Placement | None = None

    def join(self, store: dist.Store, held: str | None) -> Peers | None:
        """Join; blocks until every member has. None where this node neither sends nor receives.

        Args:
            store: of the round, a connection of this thread's own.
            held: the `holdings` of this rank's first snapshot of the round, of the same iteration on all ranks; None
                where it is torn: as if nobody held the same.

        Raises:
            PeerLost: a member did not come within PATIENCE, or never will.
        """
        context = self._context
        if context.replicas < 2:
            return None
        alone = context.num_nodes <= context.replicas  # one group, whoever holds what
        plan = self.placement = placement(
            context.num_nodes, context.replicas, domains=context.failure_domains,
            together=None if alone else self._who_holds_what(store, held),
        )  # fmt: skip
        members = plan.group_of(context.node_rank)
        return form(
            plan, node_rank=context.node_rank, local_rank=self._local_rank,
            first_ranks=tuple(node * self._local_world_size for node in range(context.num_nodes)),
            store=store, prefix=key_group(plan.groups.index(members), self._local_rank),
            store_host=context.store_host, timeout=PATIENCE,
        )  # fmt: skip

    def written_here(self) -> set[int]:
        """Ranks whose slots workers of this node write: its own, and those that it keeps replicas of."""
        nodes = {self._context.node_rank}
        if self.placement is not None:
            nodes.update(self.placement.receives_from(self._context.node_rank))
        size = self._local_world_size
        return {rank for node in nodes for rank in range(node * size, (node + 1) * size)}

    def _who_holds_what(self, store: dist.Store, held: str | None) -> list[int]:
        """Per node the first node that holds the same, itself where there is none; rank 0 says it to all."""
        size, num_nodes = self._local_world_size, self._context.num_nodes
        store.set(key_holds(self._rank), held or f"torn {self._rank}")
        if self._rank == 0:
            keys = [key_holds(rank) for rank in range(num_nodes * size)]
            _wait_for(keys, store)
            said = store.multi_get(keys)
            of_node = [tuple(said[node * size : (node + 1) * size]) for node in range(num_nodes)]
            first: dict[tuple[bytes, ...], int] = {}
            store.set(KEY_TOGETHER, json.dumps([first.setdefault(held, node) for node, held in enumerate(of_node)]))
        _wait_for([KEY_TOGETHER], store)
        told: list[int] = json.loads(store.get(KEY_TOGETHER))
        return told


def holdings(slot: Slot, manifest: Manifest, private: tuple[str, ...] = ()) -> str:
    """What a rank holds, as one checksum over those of its largest tensors, which make up COMPARED of its bytes.

    Args:
        slot: sealed.
        private: names of tensors begin so that are each rank's own, and equal by chance only.
    """
    checksums = slot.stored_checksums(slot.header())
    items = [
        (-item.length, item.name, checksum)
        for item, checksum in zip(manifest.items, checksums, strict=True)
        if item.length >= MIN_BYTES and not item.name.startswith(private)
    ]
    left = -COMPARED * sum(length for length, _, _ in items)
    digest = xxhash.xxh3_128()
    for length, name, checksum in sorted(items):
        if left <= 0:
            break
        digest.update(f"{name} {length} {checksum}\n".encode())
        left += length
    return digest.hexdigest()


def _wait_for(keys: list[str], store: dist.Store) -> None:
    wait_for(
        keys,
        store,
        left=lambda: "another rank ended, or stopped taking snapshots, before its first snapshot of the round",
        late=lambda: f"not all ranks took a snapshot within {PATIENCE}: every rank must call step()",
    )
