"""Under which address this node's peers are to reach it."""

from __future__ import annotations

import socket

from torch.distributed.elastic.rendezvous import RendezvousHandler

from gemini_run.agent.membership import Membership
from gemini_run.errors import ConfigError

ADDRESS_OF_NOBODY = "192.0.2.1"  #: RFC 5737: no host has it, so the route to it is the default route


def where(inner: RendezvousHandler, membership: Membership | None) -> tuple[str, str | None, int]:
    """(what torch takes for this node's address, host of the rendezvous, nodes at most) of any handler."""
    if membership is not None:
        return membership.address, membership.store_host(), membership.max_nodes
    endpoint = getattr(inner, "master_addr", None)
    return socket.gethostname(), endpoint, int(getattr(inner, "world_size", 1))


def advertised_address(local: str, endpoint: str | None, max_nodes: int) -> str:
    """An address of this node that its peers can use, without asking for the name of this host.

    Args:
        local: what the user gave as --local-addr, else the host's name, which often resolves nowhere.
        endpoint: host of the rendezvous: whoever reaches it is reached on the same interface.
        max_nodes: 1 = nobody else needs it.

    Raises: ConfigError for a job of several nodes on a machine without any route.
    """
    own_name = socket.gethostname().split(".")[0]
    if local and local.split(".")[0] != own_name:
        return local
    if max_nodes == 1:
        return "127.0.0.1"
    towards = endpoint or ADDRESS_OF_NOBODY
    address = _own_address_towards(towards)
    if address is not None and (not address.startswith("127.") or towards in ("localhost", "127.0.0.1", "::1")):
        return address
    # The endpoint names this very host by a name that is loopback here (Debian's 127.0.1.1), not elsewhere.
    address = _own_address_towards(ADDRESS_OF_NOBODY)
    if address is None:
        raise ConfigError(
            f"no address of this node that others could use was found (towards {towards}): give --local-addr"
        )
    return address


def _own_address_towards(host: str) -> str | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of UDP: no packet is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None
