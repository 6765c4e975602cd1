"""The one place that touches private parts of torch's DynamicRendezvousHandler. A test pins what it relies on.

What it adds: fast polling, dead members removed at once, and a look at who is a member now. All calls come from
the agent's main thread; the handler's keep-alive thread is kept out by the handler's own lock.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from gemini_run.agent.etcd_rendezvous import EtcdBackend

POLL_SECONDS = 0.02  #: between looks at the shared state while waiting in it; torch's own is 1 s
KEEP_ALIVE = timedelta(seconds=1)  #: times 3 attempts: how long an unwatched dead member blocks others
KEEP_ALIVE_IN_ETCD = timedelta(seconds=3)  #: an election there must not pass for the death of all
_ENDING_SECONDS = 2.0
_TORCH_KEEP_ALIVE = timedelta(seconds=5)  #: torch's default: the user set nothing
_EVICT_ATTEMPTS = 20

_waiting = threading.local()  #: .hook: called by this thread while it waits inside torch's rendezvous


def _short_delay(seconds: float | tuple[float, float]) -> None:
    """In the place of torch's `_delay`: its one second per poll is most of a recovery's time."""
    hook: Callable[[], None] | None = getattr(_waiting, "hook", None)
    if hook is not None:
        hook()
    time.sleep(min(POLL_SECONDS, seconds if isinstance(seconds, (int, float)) else seconds[1]))


@dataclasses.dataclass(frozen=True)
class Members:
    """Who is in the rendezvous: `participants` by the names that `Membership.me` gives, of `round`."""

    round: int
    participants: frozenset[str]


class Membership:
    """A DynamicRendezvousHandler seen from inside.

    Attributes:
        me: this node's name in the shared state.
        address: this node's address or host name as torch took it.
        max_nodes: of the job.
    """

    def __init__(self, handler: DynamicRendezvousHandler) -> None:
        self._handler = handler
        self.me = repr(handler._this_node)
        self.address: str = handler._this_node.addr
        self.max_nodes: int = handler.settings.max_nodes
        self._tune()

    def _tune(self) -> None:
        dynamic_rendezvous._delay = _short_delay
        handler = self._handler
        holder: Any = handler._state_holder
        holder._cache_duration = 0
        if handler.settings.keep_alive_interval == _TORCH_KEEP_ALIVE:
            interval = KEEP_ALIVE if isinstance(handler._store, dist.TCPStore) else KEEP_ALIVE_IN_ETCD
            settings = dataclasses.replace(handler.settings, keep_alive_interval=interval)
            executor: Any = handler._op_executor
            handler._settings = holder._settings = executor._settings = settings

    @property
    def store_may_return(self) -> bool:
        """Whether a store that cannot be reached may be reached later."""
        return not isinstance(self._handler._store, dist.TCPStore)

    def hurry(self) -> None:
        """Wait no longer for an answer of the store than an ending job does."""
        backend = getattr(self._handler._state_holder, "_backend", None)
        if isinstance(backend, EtcdBackend):
            backend.client.patience = _ENDING_SECONDS

    def store_host(self) -> str | None:
        """Where the store of the rendezvous is, if it says so (a TCPStore does)."""
        host = getattr(self._handler._store, "host", None)
        return host if isinstance(host, str) else None

    def now(self) -> Members:
        """Read the shared state. Raises: RendezvousConnectionError."""
        with self._handler._heartbeat_lock:
            self._handler._state_holder.sync()
            state = self._handler._state_holder.state
            return Members(state.round, frozenset(map(repr, state.participants)))

    def evict(self, names: set[str]) -> set[str]:
        """Remove these members, by compare-and-set; returns those that are no members any more.

        A member that is alive after all sees that it was removed and joins again.

        Raises: RendezvousConnectionError.
        """
        with self._handler._heartbeat_lock:
            return self._evict(names)

    def _evict(self, names: set[str]) -> set[str]:
        holder = self._handler._state_holder
        for _ in range(_EVICT_ATTEMPTS):
            holder.sync()
            state = holder.state
            known = {*state.last_heartbeats, *state.participants, *state.wait_list, *state.redundancy_list}
            dead = {node for node in known if repr(node) in names}
            if not dead:
                return set(names)
            was_participant = any(node in state.participants for node in dead)
            for node in dead:
                state.last_heartbeats.pop(node, None)
                state.participants.pop(node, None)
                state.wait_list.discard(node)
                state.redundancy_list.discard(node)
            if was_participant:
                dynamic_rendezvous._remove_participant_epilogue(state, self._handler.settings)
            holder.mark_dirty()
            if holder.sync():
                return set(names)
        return set()  # others change it all the time: the next look tries again

    @contextmanager
    def while_waiting(self, hook: Callable[[], None]) -> Iterator[None]:
        """Call `hook` at each poll while this thread waits inside the handler. It may call `evict_unlocked`."""
        _waiting.hook = hook
        try:
            yield
        finally:
            _waiting.hook = None

    def evict_unlocked(self, names: set[str]) -> set[str]:
        """`evict` from a hook: the handler's keep-alive thread is stopped while it waits for others."""
        return self._evict(names)

    def give_up(self) -> None:
        """The store is gone: stop the keep-alive thread, which would warn once a second."""
        self._handler._stop_heartbeats()
