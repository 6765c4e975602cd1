"""What the agents of one round say to each other while they form it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousTimeoutError

_POLL_SECONDS = 0.005
_LOOK_SECONDS = 0.1  #: between looks at the members while something is awaited from them
_STATIC_JOIN_SECONDS = 600.0  #: torch's own join timeout; a static rendezvous has no members to look at


class RoundBroken(Exception):
    """A node of the round that is being formed is gone: form it again without."""


class Exchange:
    """The agents of one round say things to each other, through the store that torch's rendezvous gave them."""

    def __init__(
        self, joined: RendezvousInfo, members: frozenset[str] | None, check_intact: Callable[[], None]
    ) -> None:
        """
        Args:
            joined: what torch's rendezvous gave this node.
            members: who is in it, None for a static one.
            check_intact: called now and then while others are awaited; raises RoundBroken.
        """
        self._check_intact = check_intact
        self._rank = joined.rank  # torch's, until `reorder`
        self._size = joined.world_size
        self._members = members
        with store_errors():
            prefix = "gemini"
            if self._members is None:
                # A static rendezvous gives the same store each time: all nodes enter each round once.
                entered = joined.store.add("gemini/entered", 1)
                prefix = f"gemini/{(entered - 1) // self._size}"
            self._store = dist.PrefixStore(prefix, joined.store)
        if self._members is not None and len(self._members) != self._size:
            raise RoundBroken("another node left meanwhile")

    def reorder(self, ranks: dict[str, int], said: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Speak in node-rank order from now on; returns `said` in that order."""
        ordered = sorted(said, key=lambda s: ranks[s["node"]["node_id"]])
        self._rank = ordered.index(said[self._rank])
        return ordered

    def gather(self, name: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        self.publish(f"{name}/{self._rank}", mine)
        return self._await([f"{name}/{rank}" for rank in range(self._size)])

    def publish(self, key: str, value: dict[str, Any]) -> None:
        with store_errors():
            self._store.set(key, json.dumps(value))

    def read(self, key: str) -> dict[str, Any]:
        return self._await([key])[0]

    def _await(self, keys: list[str]) -> list[dict[str, Any]]:
        began = looked = time.monotonic()
        while True:
            with store_errors():
                if self._store.check(keys):
                    return [json.loads(value) for value in self._store.multi_get(keys)]
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                self._check_intact()
            if self._members is None and now - began > _STATIC_JOIN_SECONDS:
                raise RendezvousTimeoutError(f"no word from another node for {_STATIC_JOIN_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError and its kin
        raise RendezvousConnectionError(str(error)) from error
