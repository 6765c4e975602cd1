"""Checkpoint process groups: small gloo groups of their own, outside c10d's registry.

One per placement group and local rank, over the round's store. The user's groups, their order, names and
`destroy_process_group` neither see nor break them.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gemini_run.errors import PeerLost
from gemini_run.plan.placement import Placement


class Peers:
    """Who this rank exchanges replicas with, and the process group to do it over.

    Attributes:
        group: the raw process group (`torch.distributed.ProcessGroupGloo`), host memory only.
        sends: group ranks that keep a replica of this rank's shard.
        receives: group rank -> global rank whose shard this rank keeps for it.
    """

    def __init__(self, group: Any, sends: tuple[int, ...], receives: dict[int, int]) -> None:
        self.group = group
        self.sends = sends
        self.receives = receives


def form(
    placement: Placement, *, node_rank: int, local_rank: int, first_ranks: tuple[int, ...], store: dist.Store,
    prefix: str, store_host: str, timeout: timedelta,
) -> Peers | None:  # fmt: skip
    """Join this rank's checkpoint process group; blocks until every member has.

    Args:
        placement: of all nodes.
        first_ranks: global rank of each node's local rank 0, by node rank.
        prefix: of the keys in `store`, the same for every member.
        store_host: the address of the round's store; the interface that reaches it carries the replicas.

    Returns:
        None where this node neither sends nor receives.

    Raises:
        PeerLost: a member did not come within `timeout`.
    """
    members = next((tuple(sorted(g)) for g in placement.groups if node_rank in g), ())
    sends, receives = placement.sends_to(node_rank), placement.receives_from(node_rank)
    if len(members) < 2 or not (sends or receives):
        return None
    where = {node: index for index, node in enumerate(members)}
    try:
        group = dist.ProcessGroupGloo(
            dist.PrefixStore(prefix, store), where[node_rank], len(members), _options(store_host, timeout)
        )
    except RuntimeError as error:
        raise PeerLost(f"the checkpoint process group of nodes {list(members)} did not form: {error}") from error
    return Peers(
        group,
        tuple(where[node] for node in sends),
        {where[node]: first_ranks[node] + local_rank for node in receives},
    )


def _options(store_host: str, timeout: timedelta) -> Any:
    # The interface: what the user told gloo, else the one that reaches the round's store. torch's default
    # resolves the own host name, which on many clusters is unknown or belongs to a management network.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 2
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        device = dist.ProcessGroupGloo.create_device(interface=interface)
    else:
        device = dist.ProcessGroupGloo.create_device(hostname=address_towards(store_host))
    options._devices = [device]
    return options


def address_towards(host: str) -> str:
    """This host's own address on the interface that reaches `host`. No packet is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
        return found
