"""The rendezvous of a run: torch's own, plus recovery before each round, sticky ranks and a fresh store.

One round, in order: torch's rendezvous; the agents exchange who they are; node ranks; recovery (`agent.recovery`);
a new store for the workers. A node that is lost meanwhile sends everyone back to the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from gemini_run.agent.address import advertised_address, where
from gemini_run.agent.exchange import Exchange, RoundBroken
from gemini_run.agent.membership import Joining, Membership
from gemini_run.agent.monitor import Monitor
from gemini_run.agent.recovery import Outcome, Recovery
from gemini_run.agent.runtime import NodeRuntime, PeerNode, RoundInfo
from gemini_run.agent.server import call
from gemini_run.errors import PeerLost
from gemini_run.plan.formation import Before
from gemini_run.plan.health import watch_targets
from gemini_run.plan.placement import placement
from gemini_run.plan.recovery import assign_node_ranks
from gemini_run.terminal import say
from gemini_run.wire import WorkerContext

RPC_REFORM = "reform"

_ANNOUNCE_SECONDS = 2.0
_STORE_SECONDS = 600.0  #: how long a round waits for a rendezvous store that may return
_ASK_AGAIN_SECONDS = 5.0
_PAUSE_SECONDS = 0.5
_STORE_GONE = "the rendezvous store cannot be reached (the node that hosts it has ended?)"
_STORE_TIMEOUT = timedelta(seconds=60)
_REACH_TIMEOUT = timedelta(seconds=5)


def wrap(inner: RendezvousHandler, runtime: NodeRuntime, local_world_size: int, role: str) -> GeminiRendezvous:
    """gemini-run's rendezvous around the one that torch made for this job."""
    return GeminiRendezvous(inner, runtime, local_world_size, role)


class GeminiRendezvous(RendezvousHandler):
    """See the module's text. `next_rendezvous` and `num_nodes_waiting` belong to the agent's main thread.

    Attributes:
        round: the present one, None before the first.
        wake_fd: readable when this node must re-form; until `next_rendezvous` is called.
        on_spare: called in `next_rendezvous`, when this node becomes a spare (True) and when it no longer is one.
    """

    def __init__(
        self, inner: RendezvousHandler, runtime: NodeRuntime, local_world_size: int, role: str = "default_role"
    ) -> None:
        self.round: RoundInfo | None = None
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.on_spare: Callable[[bool], None] = lambda spare: None
        self._inner = inner
        self._runtime = runtime
        self._local_world_size = local_world_size
        self._role = role
        self._membership = Membership(inner) if isinstance(inner, DynamicRendezvousHandler) else None
        self._address = advertised_address(*where(inner, self._membership))
        self._monitor = Monitor(self._on_lost)
        self._lock = threading.Lock()  # over the next four, which other threads write
        self._lost: set[str] = set()  # node ids that the monitor declared lost
        self._to_evict: set[str] = set()  # their names in the membership, until they are out
        self._reform_requested = -1  # newest round that a peer asked to leave
        self._names: dict[str, str] = {}  # node id -> name in the membership, of those not known to be lost
        self._unreachable = False
        self._unavoided: tuple[str, ...] = ()  # said last
        #: a cluster of etcd may get its majority back; a TCPStore is gone with its host
        self._may_return = self._membership is not None and self._membership.store_may_return
        self._ask_again_at = 0.0
        self._store: dist.TCPStore | None = None  # this round's, with its server on node rank 0
        runtime.server.rpc(RPC_REFORM, self._on_reform)

    # --- torch's interface --------------------------------------------------------------------------

    def get_backend(self) -> str:
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """The job is over for everybody: peers take this node's end as orderly."""
        self._runtime.server.finished = True
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def shutdown(self) -> bool:
        """Close for everybody. False where the rendezvous could not be told (its host has ended first)."""
        self._runtime.server.finished = True
        self._monitor.stop()
        if self._unreachable:
            return False
        if self._membership:
            self._membership.hurry()
        return bool(self._inner.shutdown())

    def num_nodes_waiting(self) -> int:
        """> 0 when this node must re-form: a peer asked for it or is lost, a node waits, or this one was evicted.

        A rendezvous store that cannot be reached ends nothing while the workers are well: 0.
        """
        with self._lock:
            if self._wanted():
                return max(1, len(self._lost))
        if self._unreachable and (not self._may_return or time.monotonic() < self._ask_again_at):
            return 0
        try:
            waiting = self._inner.num_nodes_waiting()
            if self._membership and self.round and self._membership.me not in self._membership.now().participants:
                waiting = max(1, waiting)
        except RendezvousConnectionError as error:
            self._store_is_gone(error)
            return 0
        if self._unreachable:
            self._unreachable = False
            say("the rendezvous store is reached again")
        return waiting

    def next_rendezvous(self) -> RendezvousInfo:
        """Form the next round; returns with this node's slots restored.

        Raises:
            PeerLost: the rendezvous store is gone, so no round can form.
            GeminiError: recovery is impossible, on this node or another (see `Recovery.run`).
            RendezvousError: as torch's own.
        """
        end = time.monotonic() + _STORE_SECONDS
        while True:
            with self._lock:
                self._drain()
            try:
                return self._form(self._join())
            except RoundBroken as broken:
                say(f"forming the round again: {broken}")
            except RendezvousConnectionError as error:
                self._store_is_gone(error)
                if not self._may_return:
                    raise PeerLost(
                        f"the job cannot re-form: {_STORE_GONE}. Start it again on all nodes with the same --rdzv-id "
                        "(what is in host memory is kept); --rdzv-backend gemini or etcd-v3 outlives any node"
                    ) from error
                if time.monotonic() > end:
                    raise PeerLost(f"the job cannot re-form: {error}") from error
                time.sleep(_PAUSE_SECONDS)

    # --- ours ---------------------------------------------------------------------------------------

    def announce_failure(self) -> None:
        """Ask all peers to stop and re-form, without waiting for their own workers to fail. Returns at once."""
        present = self.round
        if present is None:
            return
        for rank, peer in enumerate(present.nodes):
            if rank != present.node_rank:
                threading.Thread(
                    target=self._ask_to_reform, args=(peer, present.number), name="gemini-announce", daemon=True
                ).start()

    def leave(self) -> None:
        """This node is told to stop, the job goes on without it: tell the peers now, before its workers have ended."""
        self._runtime.server.leave()

    def _store_is_gone(self, error: RendezvousConnectionError) -> None:
        first, self._unreachable = not self._unreachable, True
        self._ask_again_at = time.monotonic() + _ASK_AGAIN_SECONDS
        if not self._may_return and self._membership:
            self._membership.give_up()
        if first and self._may_return:
            say(f"{error}; waiting for it to return, training goes on meanwhile")
        elif first:
            say(
                f"{_STORE_GONE}; training goes on, but the job cannot re-form after the next failure (--rdzv-backend "
                "gemini or etcd-v3 outlives any node)"
            )

    def worker_context(self) -> WorkerContext:
        """What the workers of this node are told of the present round."""
        present = self.round
        if present is None:
            raise RuntimeError("no round has formed yet")
        settings = self._runtime.settings
        durable = settings.durable is not None
        return WorkerContext(
            run_id=self._runtime.run_id,
            run_dir=str(self._runtime.paths.root),
            round=present.number,
            node_id=self._runtime.memory.node_id,
            node_rank=present.node_rank,
            num_nodes=present.num_nodes,
            memory_dir=str(self._runtime.memory.paths.root),
            store_host=present.store_host,
            store_port=present.store_port,
            replicas=settings.copies_among(present.num_nodes),
            failure_domains=present.failure_domains,
            snapshot_interval=settings.snapshot_interval,
            late_copy=settings.late_copy,
            durable_iterations=settings.durable_interval.iterations if durable else None,
            durable_seconds=settings.durable_interval.seconds if durable else None,
            durable_at=self._runtime.durable_at,
            restore_iteration=present.plan.iteration,
            restore_source=present.restore_source,
            reshard_from=present.plan.world_size if present.resharded else None,
            overhead_budget=settings.overhead_budget,
            lost_iterations=present.lost_iterations,
        )

    # --- news of peers (other threads) --------------------------------------------------------------

    def _on_reform(self, payload: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._reform_requested = max(self._reform_requested, int(payload["round"]))
            if self._wanted():
                os.eventfd_write(self.wake_fd, 1)
        return {}

    def _on_lost(self, peer: PeerNode, cause: str) -> None:
        with self._lock:
            name = self._names.pop(peer.node_id, None)
        if name is None:
            return  # said of a round that this node is no longer in
        say(f"node {peer.node_id} ({peer.hostname}) is lost: {cause}")
        self._runtime.event("node_lost", peer=peer.node_id, hostname=peer.hostname, cause=cause)
        with self._lock:
            self._lost.add(peer.node_id)
            self._to_evict.add(name)
            os.eventfd_write(self.wake_fd, 1)

    def _wanted(self) -> bool:
        return bool(self._lost) or (self.round is not None and self._reform_requested >= self.round.number)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def _ask_to_reform(self, peer: PeerNode, number: int) -> None:
        try:
            call(peer, RPC_REFORM, {"round": number}, peer.token, _ANNOUNCE_SECONDS, generation=number)
        except PeerLost:
            pass  # the monitor finds out by itself, or its workers fail too

    # --- forming a round ----------------------------------------------------------------------------

    def _join(self) -> RendezvousInfo:
        with _private_store:
            if self._membership is None:
                return self._inner.next_rendezvous()
            membership = self._membership
            self._stand_down_if_replaced(membership)
            self._evict(membership.evict)
            joining = Joining(
                before=self._before if self.round is not None else None,
                look=lambda: self._evict(membership.evict_unlocked),
                shrink_after=self._runtime.settings.shrink_after,
                on_spare=self._on_spare,
            )
            with membership.joining(joining):
                return self._inner.next_rendezvous()

    def _before(self) -> Before:
        with self._lock:
            names = frozenset(self._names.values())
        me = self._membership.me if self._membership else ""
        return Before(self.round.num_nodes if self.round else 1, names - {me})

    def _stand_down_if_replaced(self, membership: Membership) -> None:
        """A node that its peers declared lost, and that lives (it was frozen, or cut off), comes back as a newcomer:
        what it believes of the others is void, its rank may be another's."""
        participants = membership.now().participants
        if self.round is None or membership.me in participants or not participants:
            return
        with self._lock:
            self._lost.clear()
            self._to_evict.clear()
            self._names.clear()
        self._monitor.watch(())
        say(f"the others went on without this node after round {self.round.number}: joining as a newcomer")
        self._runtime.event("node_returned", round=self.round.number)
        self.round = None

    def _on_spare(self, spare: bool) -> None:
        if spare:
            say("all places are taken: waiting as a spare")
        self._runtime.event("spare_waiting" if spare else "spare_called")
        self.on_spare(spare)

    def _evict(self, evict: Any) -> None:
        with self._lock:
            names = set(self._to_evict)
        if names:
            gone = evict(names)
            with self._lock:
                self._to_evict -= gone

    def _form(self, joined: RendezvousInfo) -> RendezvousInfo:
        with self._lock:
            self._lost.clear()  # these made us join again
        members, torch_round = self._members_now()
        exchange = Exchange(joined, members, lambda: self._check_intact(members, torch_round))
        notes = self._runtime.memory.notes()
        mine = {
            "node": dataclasses.asdict(self._myself()),
            "name": self._membership.me if self._membership else "",
            "run_token": self._runtime.server.token,
            "round": int(notes.get("round", -1)),
            "node_rank": int(notes.get("node_rank", -1)),
        }
        said = exchange.gather("nodes", mine)
        previous = {s["node"]["node_id"]: (s["round"], s["node_rank"]) for s in said if s["round"] >= 0}
        ranks = assign_node_ranks([s["node"]["node_id"] for s in said], previous)
        said = exchange.reorder(ranks, said)
        nodes = tuple(PeerNode(**s["node"]) for s in said)
        me = ranks[self._runtime.memory.node_id]
        number = 1 + max(s["round"] for s in said)
        most = self._membership.max_nodes if self._membership else len(nodes)
        self._runtime.settings.replicas_for(most)  # ConfigError, before anything is moved
        self._runtime.server.generation = number
        # The run's token is the one of those who have been in it longest: it changes only if all are replaced.
        self._runtime.server.adopt(max(said, key=lambda s: (s["round"], -s["node_rank"]))["run_token"])
        with self._lock:
            self._names = {node.node_id: s["name"] for node, s in zip(nodes, said, strict=True)}
        self._monitor.watch([nodes[rank] for rank in watch_targets(me, len(nodes))])

        store = self._store_server() if me == 0 else None
        if store is not None:
            exchange.publish("store", {"host": self._address, "port": store.port})
        outcome = Recovery(
            self._runtime, exchange.gather, number=number, node_rank=me, nodes=nodes, continues=self.round is not None
        ).run()
        where = exchange.read("store")
        host, port = str(where["host"]), int(where["port"])
        self._store = store or self._reach_store(host, port, lambda: self._check_intact(members, torch_round))
        self._begin(number, me, nodes, outcome, host, port)
        return RendezvousInfo(
            dist.PrefixStore("gemini/agent", self._store), me, len(nodes), RendezvousStoreInfo(host, port)
        )

    def _begin(self, number: int, me: int, nodes: tuple[PeerNode, ...], outcome: Outcome, host: str, port: int) -> None:
        with self._lock:
            self.round = RoundInfo(
                number=number,
                node_rank=me,
                num_nodes=len(nodes),
                nodes=nodes,
                plan=outcome.plan,
                store_host=host,
                store_port=port,
                lost_iterations=outcome.lost_iterations,
                restore_source=outcome.restore_source,
            )
            self._lost &= {node.node_id for node in nodes}
            if self._wanted():  # asked, or lost, while the round was being formed
                os.eventfd_write(self.wake_fd, 1)
            else:
                self._drain()
        if me == 0:
            self._warn_of_shared_fates()
        self._runtime.event(
            "round_started",
            round=number,
            node_rank=me,
            nodes=[node.node_id for node in nodes],
            world_size=self.round.world_size,
            restore_iteration=outcome.plan.iteration,
            source=outcome.restore_source,
            lost_iterations=outcome.lost_iterations,
        )

    def _warn_of_shared_fates(self) -> None:
        """Say, once for each set of nodes, which copies could not be put into different failure domains."""
        present = self.round
        if present is None or present.failure_domains is None:
            return
        replicas = self._runtime.settings.copies_among(present.num_nodes)
        unavoided = placement(present.num_nodes, replicas, domains=present.failure_domains).unavoided
        if unavoided and unavoided != self._unavoided:
            more = f" (and {len(unavoided) - 1} more: events.jsonl)" if len(unavoided) > 1 else ""
            say(f"warning: placement of copies: {unavoided[0]}{more}")
            self._runtime.event("placement_shares_domain", round=present.number, unavoided=list(unavoided))
        self._unavoided = unavoided

    def _myself(self) -> PeerNode:
        server = self._runtime.server
        return PeerNode(
            self._runtime.memory.node_id,
            socket.gethostname(),
            server.host or self._address,
            server.port,
            self._local_world_size,
            server.own_token,
            self._runtime.settings.failure_domain,
            self._role,
        )

    def _store_server(self) -> dist.TCPStore:
        return dist.TCPStore(self._address, 0, is_master=True, timeout=_STORE_TIMEOUT, wait_for_workers=False)

    def _reach_store(self, host: str, port: int, check: Callable[[], None]) -> dist.TCPStore:
        """A client of the round's store. Raises: RoundBroken if its host dies before it answers."""
        while True:
            try:
                store = dist.TCPStore(host, port, is_master=False, timeout=_REACH_TIMEOUT, wait_for_workers=False)
            except dist.DistError as error:
                check()
                say(f"the store of the round at {host}:{port} does not answer yet: {str(error).splitlines()[0]}")
                continue
            store.set_timeout(_STORE_TIMEOUT)
            return store

    def _check_intact(self, members: frozenset[str] | None, torch_round: int | None) -> None:
        """Raises: RoundBroken if one of `members` left torch's rendezvous or was declared lost."""
        with self._lock:
            if self._lost:
                raise RoundBroken(f"node {', '.join(sorted(self._lost))} was lost meanwhile")
            if members is not None and self._to_evict & members:
                raise RoundBroken("a node that was lost is still a member")
        if self._membership is None or members is None:
            return
        now = self._membership.now()
        if now.round != torch_round or not members <= now.participants:
            raise RoundBroken("another node left meanwhile")

    def _members_now(self) -> tuple[frozenset[str] | None, int | None]:
        if self._membership is None:
            return None, None
        now = self._membership.now()
        return now.participants, now.round


class _PrivateStore:
    """torch shares one store over all rounds, and a survivor of a round never publishes it again, so a replacement
    node waits for it for ever. Switched off, each round has bootstrap information of its own.

    Counted, because threads may rendezvous side by side: the last one out puts the variable back as it was.
    """

    NAME = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = os.environ.get(self.NAME)
                os.environ[self.NAME] = "1"
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            if self._before is None:
                os.environ.pop(self.NAME, None)
            else:
                os.environ[self.NAME] = self._before


_private_store = _PrivateStore()
