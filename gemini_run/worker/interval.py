"""Which snapshot interval all ranks agree on: the longest that any of them needs, in one key of the round's store.

Rank 0 reads it once a commit; the others touch it only when what they need changes. Whoever set it may lower it again,
whoever needs more then raises it, one commit later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch.distributed as dist

from gemini_run.wire import KEY_INTERVAL, Interval


class Intervals:
    """One rank's part. Used by the commit thread."""

    def __init__(
        self, rank: int, shortest: int, *, need: Callable[[], Interval] | None = None,
        on_change: Callable[[Interval], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """
        Args:
            shortest: iterations between snapshots, as asked for.
            need: what this rank needs now; None where it always has enough.
            on_change: called on rank 0 with what is in force from the next record on.
        """
        self._rank = rank
        self._need = need
        self._on_change = on_change
        self._asked: Interval | None = None  # what this rank has put into the store
        self._known = Interval(shortest, "as asked for")

    def open(self, store: dist.Store) -> None:
        """Rank 0, before its first record."""
        if self._rank == 0:
            store.set(KEY_INTERVAL, self._known.to_json())

    def ask(self, in_force: int, store: dist.Store) -> None:
        """Say what this rank needs, if that is news. `in_force`: what the newest record says."""
        if self._need is None:
            return
        need = dataclasses.replace(self._need(), rank=self._rank)
        if need == self._asked or (self._asked is None and need.iterations <= in_force):
            return
        held = store.get(KEY_INTERVAL)  # waits until rank 0 has set it
        while True:
            other = Interval.from_json(held)
            if other.rank != self._rank and other.iterations >= need.iterations:
                self._asked = None
                return
            text = need.to_json().encode()
            found = store.compare_set(KEY_INTERVAL, held.decode(), text.decode())
            if found == text:
                self._asked = need
                return
            held = found  # another rank was first

    def decide(self, store: dist.Store) -> int:
        """Rank 0: iterations between snapshots from the next record on."""
        asked = Interval.from_json(store.get(KEY_INTERVAL))
        if asked != self._known:
            self._known = asked
            self._on_change(asked)
        return asked.iterations
