"""The one place that touches private parts of torch's DynamicRendezvousHandler. A test pins what it relies on.

What it adds: fast polling, dead members removed at once, a look at who is a member now, and rules of ours for who
joins and when a round begins (`plan.formation`). All calls come from the agent's main thread; the handler's keep-alive
thread is kept out by the handler's own lock.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from gemini_run.agent.etcd_rendezvous import EtcdBackend
from gemini_run.plan.formation import PLACE_SECONDS, Before, Forming, may_begin

POLL_SECONDS = 0.02  #: between looks at the shared state while waiting in it; torch's own is 1 s
KEEP_ALIVE = timedelta(seconds=1)  #: times 3 attempts: how long an unwatched dead member blocks others
KEEP_ALIVE_IN_ETCD = timedelta(seconds=3)  #: an election there must not pass for the death of all
_ENDING_SECONDS = 2.0
_TORCH_KEEP_ALIVE = timedelta(seconds=5)  #: torch's default: the user set nothing
_EVICT_ATTEMPTS = 20
_CLOCKS_DIFFER = timedelta(minutes=1)  #: at most: a heartbeat that looks older at first sight is that of a dead node

_waiting = threading.local()  #: .joining: the Joining of this thread while it is inside torch's rendezvous


def _short_delay(seconds: float | tuple[float, float]) -> None:
    """In the place of torch's `_delay`: its one second per poll is most of a recovery's time."""
    joining: Joining | None = getattr(_waiting, "joining", None)
    if joining is not None:
        joining.look()
    time.sleep(min(POLL_SECONDS, seconds if isinstance(seconds, (int, float)) else seconds[1]))


class _JoinOp(dynamic_rendezvous._RendezvousJoinOp):
    """In the place of torch's: the same, but where `Joining` decides otherwise."""

    def __call__(self, ctx: Any, deadline: float) -> Any:
        joining: Joining | None = getattr(_waiting, "joining", None)
        action = joining.decide(ctx, deadline) if joining is not None else None
        return super().__call__(ctx, deadline) if action is None else action


class Joining:
    """One node's way into the next round.

    torch's own rule lets spares take the places of nodes that only re-form, waits its last call (30 s) whenever a job
    of MIN:MAX is not full, and has a node that came too late ask all others to re-form for ever.

    Args:
        before: what this node remembers of the round before, asked at each look; None if it was not in it.
        look: called at each poll.
        shrink_after: seconds; see `may_begin`.
        on_spare: called when this node becomes a spare (True), and when it no longer is one.
    """

    def __init__(
        self,
        *,
        before: Callable[[], Before] | None,
        look: Callable[[], None],
        shrink_after: float,
        on_spare: Callable[[bool], None],
    ) -> None:
        self.look = look
        self._before = before
        self._shrink_after = shrink_after
        self._on_spare = on_spare
        self._began = time.monotonic()
        self._spare = False
        self._free_since: float | None = None

    def decide(self, ctx: Any, deadline: float) -> Any:
        """torch's next action, or None to leave it to torch. Called between a read and a write of the state."""
        state, me = ctx.state, repr(ctx.node)
        forming = Forming(
            frozenset(map(repr, state.participants)), frozenset(map(repr, state.wait_list)),
            ctx.settings.min_nodes, ctx.settings.max_nodes,
        )  # fmt: skip
        if state.closed:
            return None
        if me in forming.joined:
            self._tell(False)
            return None if state.complete or time.monotonic() > deadline else self._begin(ctx, forming)
        full = state.complete and len(forming.joined) >= forming.most
        if ctx.node not in state.redundancy_list:
            if (full and me in forming.coming) or (self._before is None and not forming.place_for(me)):
                state.wait_list.discard(ctx.node)  # there it would have all others re-form
                return dynamic_rendezvous._Action.ADD_TO_REDUNDANCY_LIST
            if self._before is None and state.round > 0 and not state.complete and me not in forming.coming:
                # A place that is empty for a moment is that of a member which re-forms.
                self._free_since = self._free_since or time.monotonic()
                return _hold(ctx) if time.monotonic() - self._free_since < PLACE_SECONDS else None
            return None
        if forming.place_for(me):
            self._free_since = self._free_since or time.monotonic()
            if time.monotonic() - self._free_since >= PLACE_SECONDS:
                self._tell(False)
                return dynamic_rendezvous._Action.REMOVE_FROM_REDUNDANCY_LIST
        else:
            self._free_since = None
            self._tell(True)
        return _hold(ctx)

    def _begin(self, ctx: Any, forming: Forming) -> Any:
        state, settings = ctx.state, ctx.settings
        if self._before is not None:
            waited = time.monotonic() - self._began
            limit = settings.timeout.last_call.total_seconds()
            if may_begin(forming, self._before(), waited=waited, shrink_after=self._shrink_after, limit=limit):
                return dynamic_rendezvous._Action.MARK_RENDEZVOUS_COMPLETE
            return _hold(ctx)
        if state.round == 0 or state.deadline is None:
            return None
        # Those who were in the round before know whom to wait for: torch's rule is for the case that none is left.
        left_to_others = state.deadline + timedelta(seconds=self._shrink_after)
        return _hold(ctx) if datetime.now(timezone.utc) < left_to_others else None

    def _tell(self, spare: bool) -> None:
        if spare != self._spare:
            self._spare = spare
            self._on_spare(spare)


def _hold(ctx: Any) -> Any:
    action = dynamic_rendezvous._Action
    return action.KEEP_ALIVE if dynamic_rendezvous._should_keep_alive(ctx) else action.SYNC


def _judge_by_own_clock(holder: Any) -> None:
    """Let a member count as dead once its heartbeat has not changed for so long here.

    torch compares the time that the member wrote with this node's: where their clocks differ by more than the limit,
    the living are thrown out for ever.
    """
    torchs = holder._sanitize
    seen: dict[Any, tuple[datetime, float]] = {}  # node -> its heartbeat, and when it was first read (monotonic)

    def sanitize() -> None:
        written: dict[Any, datetime] = holder.state.last_heartbeats
        now, clock = datetime.now(timezone.utc), time.monotonic()
        for node in seen.keys() - written.keys():
            del seen[node]
        for node, beat in written.items():
            if node not in seen:
                seen[node] = (beat, clock if now - beat < _CLOCKS_DIFFER else -float("inf"))
            elif seen[node][0] != beat:
                seen[node] = (beat, clock)
        ages = {node: min(clock - since, 1e6) for node, (_, since) in seen.items()}
        holder.state.last_heartbeats = {node: now - timedelta(seconds=ages[node]) for node in written}
        torchs()
        holder.state.last_heartbeats = {node: written[node] for node in holder.state.last_heartbeats}

    holder._sanitize = sanitize


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
        dynamic_rendezvous._RendezvousJoinOp = _JoinOp  # type: ignore[misc]
        handler = self._handler
        holder: Any = handler._state_holder
        holder._cache_duration = 0
        _judge_by_own_clock(holder)
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
    def joining(self, joining: Joining) -> Iterator[None]:
        """Let `joining` decide while this thread is inside the handler. Its `look` may call `evict_unlocked`."""
        _waiting.joining = joining
        try:
            yield
        finally:
            _waiting.joining = None

    def evict_unlocked(self, names: set[str]) -> set[str]:
        """`evict` from a look: the handler's keep-alive thread is stopped while it waits for others."""
        return self._evict(names)

    def give_up(self) -> None:
        """The store is gone: stop the keep-alive thread, which would warn once a second."""
        self._handler._stop_heartbeats()
