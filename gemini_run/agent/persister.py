"""Keeps the durable tier fed while the job trains: in every agent a thread, of which the root's leads.

Two phases. The root (node rank 0) sees a slot that the workers marked for the durable tier and that is committed
everywhere. It asks all nodes for manifests and checksums, decides who stores what, and lets them store it;
when all have, it writes the commit marker. A failure anywhere only costs this one checkpoint: holds are
cleared, and the next interval tries again. Training is never waited for, and never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gemini_run.agent.persist_node import Message, NodePart, decode_stored
from gemini_run.agent.runtime import NodeRuntime, RoundInfo
from gemini_run.agent.server import AgentServer
from gemini_run.agent.server import call as http_call
from gemini_run.durable.checkpoint import newest_committed, prune, remove, remove_partial
from gemini_run.durable.tier import DurableTier, open_tier
from gemini_run.durable.upload import Stored, commit
from gemini_run.errors import CallerLate, DurableError, GeminiError, PeerLost
from gemini_run.memory.beacons import read_beacons
from gemini_run.plan.manifest import Manifest
from gemini_run.plan.persist import Assignment, Shard, assign
from gemini_run.plan.recovery import rank_ranges
from gemini_run.terminal import say

POLL = 0.2  #: seconds between looks at the slots' headers
CALL_TIMEOUT = 120.0  #: seconds a peer has to answer; sealing a big slot takes some
ROUND_PATIENCE = 2.0  #: seconds that the nodes of a round may differ in when they begin to form it
RPC_COLLECT, RPC_UPLOAD, RPC_STATUS = "persist-collect", "persist-upload", "persist-status"
RPC_RELEASE, RPC_WANT = "persist-release", "persist-want"


Call = Callable[[Any, str, Message], Message]  #: (peer, name, payload) -> answer; raises PeerLost


def ask_over_http(server: AgentServer) -> Call:
    """Ask other agents, as the agent of `server` in its present round."""

    def ask(peer: Any, name: str, payload: Message) -> Message:
        end = time.monotonic() + ROUND_PATIENCE
        while True:
            generation = server.generation
            stated = generation if generation >= 0 else None
            try:
                return http_call(peer, name, payload, peer.token, CALL_TIMEOUT, generation=stated)
            except CallerLate:
                # A moment ahead of this node, which is about to form the same round; or this node is left behind.
                while server.generation == generation:
                    if time.monotonic() > end:
                        raise
                    time.sleep(POLL / 4)

    return ask


class Persister:
    """Durable checkpoints of one agent. Without ``--durable`` it does nothing.

    Attributes:
        durable: newest iteration known to be in the durable tier, None before one is.
        failures: attempts that failed since the last one that did not (on the root).
    """

    def __init__(
        self,
        runtime: NodeRuntime,
        rendezvous: Any,
        *,
        call: Call | None = None,
        tier: DurableTier | None = None,
    ) -> None:
        """
        Args:
            rendezvous: its ``round`` is the present RoundInfo, None before the first.
            call: asks another agent; default: over HTTP.
            tier: default: the one that the settings name.

        Raises: ConfigError for a location that cannot be one.
        """
        self._runtime = runtime
        self._rendezvous = rendezvous
        self._call = call or ask_over_http(runtime.server)
        location = runtime.settings.durable
        self._tier = tier or (open_tier(location) if location else None)
        self.failures = 0
        self._found: int | None = None  # newest one of the tier when we came
        self._made: int | None = None  # newest one that was stored since
        self._failed: int | None = None  # newest iteration whose attempt failed
        self._wanted: int | None = None  # asked for by someone who is ending
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._nodes: Sequence[Any] = ()
        if self._tier is not None:
            self._node = NodePart(runtime.memory, self._tier)
            self._handlers: Mapping[str, Callable[[Message], Message]] = {
                RPC_COLLECT: self._node.collect,
                RPC_UPLOAD: self._node.upload,
                RPC_STATUS: self._node.status,
                RPC_RELEASE: self._on_release,
                RPC_WANT: self._on_want,
            }
            for name, handler in self._handlers.items():
                runtime.server.rpc(name, handler)

    @property
    def durable(self) -> int | None:
        told = self._node.durable if self._tier is not None else None
        return max((i for i in (self._made, told) if i is not None), default=self._found)

    def on_round(self) -> None:
        """A new round has formed. An upload goes on if all its nodes are still there, else it ends."""
        if self._tier is None:
            return
        nodes = tuple(self._rendezvous.round.nodes)
        if _identities(nodes) != _identities(self._nodes):
            self._node.stop()
        self._nodes = nodes
        self._failed = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="gemini-persist", daemon=True)
            self._thread.start()

    def finish(self, success: bool) -> None:
        """The job is over here and no worker runs: see the newest committed iteration into the durable tier.

        Waits for at most `durable_timeout` seconds; says so where that is not enough, and always what the
        newest durable iteration is. The persister does nothing afterwards.

        Args:
            success: False where the job was ended by a signal or has failed.
        """
        if self._tier is None or self._thread is None:
            return
        if self._rendezvous.round is None:  # left behind by the others, or a spare
            self.close()
            return
        newest = self._newest_here()
        if newest is not None and not self._is_durable(newest):
            deadline = time.monotonic() + self._runtime.settings.durable_timeout
            problem: str | None = "a further signal ended the wait"  # if it raises
            try:
                problem = self._see_to(newest, deadline)
            finally:
                if problem is not None and not self._is_durable(newest):
                    say(f"iteration {newest} did not reach the durable tier {self._tier.location}: {problem}")
                    self._runtime.event("persist_abandoned", iteration=newest, reason=problem)
        self.close()
        if self.durable is not None:
            say(f"newest durable checkpoint: iteration {self.durable} in {self._tier.location}")
        elif success or newest is not None:
            say(f"no durable checkpoint was made in {self._tier.location}")

    def close(self) -> None:
        """Stop at once, whatever is on its way. Idempotent."""
        self._closing.set()
        self._wake.set()
        if self._tier is not None:
            self._tier.cancel()
            self._node.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    # --- ending ---------------------------------------------------------------------------------------

    def _see_to(self, iteration: int, deadline: float) -> str | None:
        """Wait until `iteration` is durable; else why it is not."""
        root = self._rendezvous.round.node_rank == 0
        while time.monotonic() < deadline:
            if self._is_durable(iteration):
                return None
            try:
                answer = (
                    self._on_want({"iteration": iteration})
                    if root
                    else self._call(self._rendezvous.round.nodes[0], RPC_WANT, {"iteration": iteration})
                )
            except PeerLost:
                return "the agent that leads the upload has ended"
            if answer["done"]:
                self._made = iteration
                return None
            if answer["failed"] is not None and answer["failed"] >= iteration:
                return "the upload failed"
            with self._changed:
                self._changed.wait(min(POLL, max(0.0, deadline - time.monotonic())))
        return f"not uploaded within {self._runtime.settings.durable_timeout:g} s (--durable-timeout)"

    def _on_want(self, payload: Message) -> Message:
        """``{iteration}``: a node is ending and wants it durable -> ``{done, failed}``."""
        iteration = int(payload["iteration"])
        done, failed = self._is_durable(iteration), self._failed
        if not done and (failed is None or failed < iteration):
            self._wanted = max(self._wanted or 0, iteration)
            self._wake.set()
        return {"done": done, "failed": failed}

    def _on_release(self, payload: Message) -> Message:
        """As `NodePart.release`; every node remembers when, for whoever leads next."""
        if payload["durable"] is not None:
            self._runtime.durable_at = time.time()
        return self._node.release(payload)

    def _newest_here(self) -> int | None:
        """Newest iteration committed on every rank whose slots are all here."""
        memory = self._runtime.memory
        committed = [b.committed for b in read_beacons(memory.paths).values() if b.committed > 0]
        newest = max(committed, default=0)
        world_size = self._rendezvous.round.world_size
        # A round of another size goes on from slots that are not its ranks': those are durable already, or never.
        if newest and all(memory.find(rank, newest, world_size) for rank in self._own()):
            return newest
        return None

    def _is_durable(self, iteration: int) -> bool:
        if self._found == iteration:
            return True
        # A later one that was there before we came does not count: the job went back behind it.
        made = max((i for i in (self._made, self._node.durable) if i is not None), default=None)
        return made is not None and made >= iteration

    def _own(self) -> range:
        """Global ranks of this node."""
        present: RoundInfo = self._rendezvous.round
        return _ranks(present)[present.node_rank]

    # --- the thread ---------------------------------------------------------------------------------

    def _main(self) -> None:
        assert self._tier is not None, "started without a tier"
        try:
            self._found = newest_committed(self._tier)
        except (GeminiError, OSError) as error:
            say(f"the durable tier cannot be read yet: {error}")
        while not self._closing.is_set():
            self._wake.wait(POLL)
            self._wake.clear()
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001 - the thread's top: persisting must go on
                say(f"durable tier: {error!r}; trying again")
                self._closing.wait(1.0)

    def _tick(self) -> None:
        present = self._rendezvous.round
        if present is None or self._closing.is_set():
            return
        if present.node_rank == 0:
            iteration = self._due(present)
            if iteration is not None:
                self._attempt(iteration, present)
        self._node.sweep(present.number, _ranks(present)[present.node_rank])

    def _due(self, present: RoundInfo) -> int | None:
        """The iteration to persist now, if any."""
        memory = self._runtime.memory
        own = _ranks(present)[present.node_rank]
        beacons = read_beacons(memory.paths)
        due = [] if self._wanted is None or self._is_durable(self._wanted) else [self._wanted]
        for info in memory.scan():
            header = info.header
            if not header or not info.usable or not header.hold or header.owner not in own:
                continue
            beacon = beacons.get(header.owner - own.start)
            if header.round == present.number and beacon and beacon.committed >= header.iteration:
                due.append(header.iteration)
        return max((i for i in due if self._failed is None or i > self._failed), default=None)

    def _attempt(self, iteration: int, present: RoundInfo) -> None:
        """Persist it; whatever happens, holds are cleared and everyone is told."""
        assert self._tier is not None, "no tier"
        started = time.monotonic()
        durable: int | None = None
        late = False
        try:
            size = self._persist(iteration, present)
            durable = self._made = iteration
            self.failures = 0
            seconds = time.monotonic() - started
            self._runtime.event(
                "persisted", iteration=iteration, bytes=size, seconds=round(seconds, 3),
                location=self._tier.location,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - an attempt's top: training goes on without this checkpoint
            self._failed = iteration
            self.failures += 1
            late = isinstance(error, CallerLate)
            cause = str(error) if isinstance(error, GeminiError) else repr(error)
            say(
                f"durable checkpoint of iteration {iteration} failed ({self.failures} in a row), the next "
                f"interval tries again: {cause}"
            )
            self._runtime.event("persist_failed", iteration=iteration, error=cause, failures=self.failures)
        finally:
            self._release(iteration, durable, present)
            with self._changed:
                self._changed.notify_all()
        if not late:  # else the tier is another root's to tidy, and its upload may be under way
            self._tidy(durable)

    def _persist(self, iteration: int, present: RoundInfo) -> int:
        """The two phases. Returns: bytes stored."""
        assert self._tier is not None, "no tier"
        ranks = _ranks(present)
        shards: dict[int, Shard] = {}
        for peer, own in zip(present.nodes, ranks, strict=True):
            answer = self._ask(
                peer, RPC_COLLECT, {"iteration": iteration, "ranks": list(own), "world_size": present.world_size}
            )
            for rank, part in answer["ranks"].items():
                manifest = Manifest.from_json(part["manifest"].encode())
                shards[int(rank)] = Shard(manifest, tuple(part["checksums"]))
        # Only now: a node that its peers have left behind (frozen, say) was refused above, and touches nothing.
        remove_partial(self._tier)
        remove(self._tier, iteration)  # of a time line that the job left: never half old, half new
        assignment = assign(shards)
        for node_rank, (peer, own) in enumerate(zip(present.nodes, ranks, strict=True)):
            self._ask(peer, RPC_UPLOAD, _orders(assignment, iteration, node_rank, own))
        stored = Stored()
        for peer in present.nodes:
            stored.add(self._await(peer, iteration, present))
        marker = commit(
            self._tier, iteration, assignment, stored,
            world_size=ranks[-1].stop, run_id=self._runtime.run_id, now=time.time(),
        )  # fmt: skip
        return marker.size

    def _await(self, peer: Any, iteration: int, present: RoundInfo) -> Stored:
        while True:
            answer = self._ask(peer, RPC_STATUS, {"iteration": iteration})
            if not answer["running"]:
                return decode_stored(answer)
            if self._closing.wait(POLL / 2):
                raise DurableError("the agent is ending")
            now = self._rendezvous.round
            if now is not None and _identities(now.nodes) != _identities(present.nodes):
                raise DurableError("the job re-formed with other nodes meanwhile")

    def _release(self, iteration: int, durable: int | None, present: RoundInfo) -> None:
        payload = {"iteration": iteration, "durable": durable}
        for peer in reversed(present.nodes):  # this one last: as long as its slots are held, no other ones will be
            try:
                self._ask(peer, RPC_RELEASE, payload)
            except GeminiError:
                pass  # it is gone, and so are its holds; or its own sweep clears them next round

    def _tidy(self, durable: int | None) -> None:
        """After a commit drop what is beyond retention; after a failure what was stored in vain."""
        assert self._tier is not None, "no tier"
        try:
            if durable is not None:
                prune(self._tier, self._runtime.settings.durable_keep, newest=durable)
            else:
                remove_partial(self._tier)
        except (GeminiError, OSError) as error:
            say(f"old durable checkpoints were not removed, the next time tries again: {error}")

    def _ask(self, peer: Any, name: str, payload: Message) -> Message:
        own = peer.node_id == self._runtime.memory.node_id
        answer = self._handlers[name](payload) if own else self._call(peer, name, payload)
        if "error" in answer:
            raise DurableError(str(answer["error"]))
        return answer


def _orders(assignment: Assignment, iteration: int, node_rank: int, own: range) -> Message:
    """What a node is told to store, as JSON."""
    ranks = {}
    for rank in own:
        ranks[str(rank)] = {"writes": assignment.writes_of(rank), "uses": assignment.uses[rank]}
    return {"iteration": iteration, "node_rank": node_rank, "ranks": ranks}


def _ranks(present: RoundInfo) -> list[range]:
    return rank_ranges([node.local_world_size for node in present.nodes])


def _identities(nodes: Sequence[Any]) -> list[tuple[str, int]]:
    return [(node.node_id, node.local_world_size) for node in nodes]
