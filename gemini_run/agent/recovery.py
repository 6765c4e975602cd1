"""One round's recovery on one node: agree on a plan, carry it out, agree that it worked.

All agents run this at the same time and meet in `gather`; each step is decided from what everybody said, so all
decide alike. When it returns, the slot (rank, iteration) of each of this node's ranks is complete here; or, where the
checkpoint is of another number of ranks, its workers are told where to read what they need (`agent.reshard`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gemini_run.agent.reshard import check_copy, held_by, tell_workers
from gemini_run.agent.runtime import NodeRuntime, PeerNode
from gemini_run.errors import DurableError, FormatVersionError, GeminiError, PeerLost, ReplicaCorrupt, Unrecoverable
from gemini_run.memory.beacons import read_beacons
from gemini_run.memory.segment import SlotInfo, durable_refused
from gemini_run.memory.settle import settle_file
from gemini_run.memory.slots import Slot
from gemini_run.peers.pull import Source, pull_slot
from gemini_run.plan.inventory import after_fetches, memory_health
from gemini_run.plan.recovery import (
    Fetch,
    History,
    NodeFacts,
    RecoveryPlan,
    SlotFact,
    as_history,
    extend_history,
    on_course,
    plan_recovery,
    rank_ranges,
)
from gemini_run.terminal import say

ATTEMPTS = 12  #: plans tried in one round, each without the copies that failed before
PARALLEL_PULLS = 4
DURABLE_CANDIDATES = 4  #: newest durable iterations looked at

Copy = tuple[int, int, int]  #: node rank, owner, iteration


class Gather(Protocol):
    """Exchange between the agents of a round: everybody says something, everybody gets all that was said.

    Returns what the nodes said, in node-rank order. Blocks until all have spoken. A name is used once a round.
    Raises whatever ends the round when a node is lost meanwhile.
    """

    def __call__(self, name: str, mine: dict[str, Any]) -> list[dict[str, Any]]: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the round continues from, on this node. See `RoundInfo` for the words.

    Attributes:
        lost_iterations: finished in the round before, or what that one went on from, and to be done again: adds up
            over the rounds.
        behind: how far back from the furthest iteration that was trained last. More than `lost_iterations` where the
            round before went back and then trained nothing.
    """

    plan: RecoveryPlan
    lost_iterations: int
    behind: int
    restore_source: str


@dataclasses.dataclass
class _Failure:
    """Why an attempt failed here: `copies` and `durable` are not to be used again, `fatal` ends the job."""

    copies: list[Copy] = dataclasses.field(default_factory=list)
    durable: bool = False
    fatal: str | None = None


class Recovery:
    """See the module's text.

    Args:
        number: of the round that is being formed.
        node_rank: of this node; `nodes` are all nodes in node-rank order.
        continues: this agent was in the round before.
    """

    def __init__(
        self,
        runtime: NodeRuntime,
        gather: Gather,
        *,
        number: int,
        node_rank: int,
        nodes: Sequence[PeerNode],
        continues: bool = False,
    ) -> None:
        self._runtime = runtime
        self._memory = runtime.memory
        self._gather = gather
        self._number = number
        self._continues = continues
        self._me = node_rank
        self._nodes = tuple(nodes)
        self._ranks = rank_ranges([node.local_world_size for node in nodes])
        self._world_size = sum(node.local_world_size for node in nodes)
        self._excluded: set[Copy] = set()
        self._durable_excluded: set[int] = set()
        self._refused: set[Path] = set()  # said once

    def run(self) -> Outcome:
        """Carry the newest iteration that can be had into this node's memory.

        Raises:
            Unrecoverable: nothing was found and --require-checkpoint is set, or no plan worked.
            MemoryFull: this node has no room for its slots (its peers raise Unrecoverable that names it).
            DurableError: memory does not suffice and the durable tier cannot be read.
        """
        facts: list[dict[str, Any]] = []
        for attempt in range(ATTEMPTS):
            facts = self._gather(f"facts/{attempt}", self._facts())
            self._durable_excluded |= {int(iteration) for said in facts for iteration in said["durable_refused"]}
            plan = self._plan(attempt, facts)
            self._refuse_to_go_behind(plan, facts)
            if plan.source == "none" and self._runtime.settings.require_checkpoint:
                raise Unrecoverable(
                    f"no checkpoint found ({plan.reason}) and --require-checkpoint asks for one: run without it to "
                    "start from scratch"
                )
            self._runtime.event(
                "plan_made",
                round=self._number,
                source=plan.source,
                iteration=plan.iteration,
                fetches=[dataclasses.asdict(fetch) for fetch in plan.fetches],
                lost=plan.lost,
                world_size=plan.world_size,
                reason=plan.reason,
            )
            if self._carried_out(attempt, plan):
                return self._conclude(plan, facts)
        raise Unrecoverable(
            f"{ATTEMPTS} recovery plans in a row failed, each on another bad copy; the events of the run name them: "
            f"{self._runtime.paths.events}"
        )

    # --- facts and plan -----------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        notes = self._memory.notes()
        history = as_history(notes.get("history", ()))
        self._refuse_off_course(history)
        return {
            "slots": [dataclasses.astuple(fact) for fact in self._inventory()],
            "history": history,
            "finished": self._finished(float(notes.get("at", 0))),
            "start": int(notes.get("start", 0)),
            "furthest": int(notes.get("furthest", 0)),
            "durable_at": max(self._runtime.durable_at, float(notes.get("durable_at", 0))),
            "continues": self._continues,
            "durable_refused": durable_refused(self._memory.paths),
            "unknown": [f"{info.path}: {info.problem}" for info in self._memory.scan() if info.unknown_version],
        }

    def _finished(self, since: float) -> int:
        """Iterations that this node's workers have finished, 0 where none said anything since the last round began."""
        beacons = read_beacons(self._memory.paths).values()
        return max((beacon.iteration for beacon in beacons if beacon.changed_at >= since), default=0)

    def _inventory(self) -> list[SlotFact]:
        facts = []
        for info in self._memory.scan():
            header = info.header
            if header and info.usable:
                sealed = bool(header.sealed)
                facts.append(
                    SlotFact(header.owner, header.iteration, header.round, header.world_size, sealed, header.end)
                )
            elif not info.torn and not info.unknown_version and info.path not in self._refused:
                self._refused.add(info.path)
                say(f"slot refused: {info.path}: {info.problem}")
                self._runtime.event("replica_refused", round=self._number, reason=f"{info.path}: {info.problem}")
        return facts

    def _refuse_to_go_behind(self, plan: RecoveryPlan, facts: Sequence[dict[str, Any]]) -> None:
        """What this release cannot read is not thrown away by training from an older state, or from scratch.

        Raises: Unrecoverable.
        """
        unknown = [slot for said in facts for slot in said["unknown"]]
        if unknown and plan.source != "memory":
            raise Unrecoverable(f"{unknown[0]} (or start under another --rdzv-id)")

    def _nodes_of(self, facts: Sequence[dict[str, Any]]) -> list[NodeFacts]:
        return [
            NodeFacts(
                peer.node_id,
                rank,
                peer.local_world_size,
                tuple(SlotFact(*slot) for slot in said["slots"]),
                as_history(said["history"]),
            )
            for rank, (peer, said) in enumerate(zip(self._nodes, facts, strict=True))
        ]

    def _plan(self, attempt: int, facts: Sequence[dict[str, Any]]) -> RecoveryPlan:
        nodes = self._nodes_of(facts)
        excluded = frozenset(self._excluded)
        plan = plan_recovery(nodes, excluded=excluded)
        # The durable tier is filled from memory: where memory is whole and a node was in the round before, it cannot
        # be behind, and nobody waits for a listing. A node that was away knows nothing of what was stored since.
        if self._runtime.settings.durable is None or (
            plan.source == "memory" and any(said["continues"] for said in facts)
        ):
            return plan
        iteration, world_size = self._newest_durable(attempt) or (None, None)
        return plan_recovery(nodes, iteration, world_size, excluded=excluded)

    def _newest_durable(self, attempt: int) -> tuple[int, int] | None:
        """(iteration, world size) of the newest one that every node can read.

        Raises: DurableError where a node cannot look.
        """
        mine: dict[str, Any] = {"found": [], "error": None}
        try:
            mine["found"] = self._durable_checkpoints()
        except GeminiError as error:
            mine["error"] = str(error)
        said = self._gather(f"durable/{attempt}", mine)
        for peer, answer in zip(self._nodes, said, strict=True):
            if answer["error"] is not None:
                # Starting over while checkpoints may be there would in the end overwrite them.
                raise DurableError(f"node {peer.node_id} cannot read the durable tier: {answer['error']}")
        common = set.intersection(*({(int(i), int(w)) for i, w in answer["found"]} for answer in said))
        return max((found for found in common if found[0] not in self._durable_excluded), default=None)

    def _durable_checkpoints(self) -> list[tuple[int, int]]:
        """(iteration, world size) of the newest usable ones."""
        from gemini_run.durable.checkpoint import committed, read_marker  # only here: pulls in the tier's client
        from gemini_run.durable.tier import ObjectMissing, open_tier

        tier = open_tier(str(self._runtime.settings.durable))
        usable = []
        for iteration in committed(tier):
            try:
                marker = read_marker(tier, iteration)
            except FormatVersionError:
                raise  # going back behind it in silence would throw work away
            except (ReplicaCorrupt, ObjectMissing) as error:
                say(f"durable checkpoint of iteration {iteration} refused: {error}")
                continue
            usable.append((iteration, marker.world_size))
            if len(usable) == DURABLE_CANDIDATES:
                break
        return usable

    # --- execution ----------------------------------------------------------------------------------

    def _carried_out(self, attempt: int, plan: RecoveryPlan) -> bool:
        """Execute `plan` here, learn how it went elsewhere, and drop what proved bad. True if all succeeded."""
        failure, error = self._execute(plan)
        said = self._gather(f"done/{attempt}", dataclasses.asdict(failure))
        if error is not None and failure.fatal:
            raise error
        for peer, answer in zip(self._nodes, said, strict=True):
            if answer["fatal"]:
                raise Unrecoverable(f"node {peer.node_id} cannot recover: {answer['fatal']}")
        bad = {(int(rank), int(owner), int(i)) for answer in said for rank, owner, i in answer["copies"]}
        self._excluded |= bad
        self._drop({(owner, i) for rank, owner, i in bad if rank == self._me})
        durable_failed = any(answer["durable"] for answer in said)
        if durable_failed and plan.iteration is not None:
            self._durable_excluded.add(plan.iteration)
        return not bad and not durable_failed

    def _execute(self, plan: RecoveryPlan) -> tuple[_Failure, GeminiError | None]:
        failure = _Failure()
        if plan.iteration is None:
            return failure, None
        ranks: Iterable[int] = self._ranks[self._me]
        first: GeminiError | None = None
        with concurrent.futures.ThreadPoolExecutor(PARALLEL_PULLS, thread_name_prefix="gemini-recover") as pool:
            if plan.world_size != self._world_size:
                return failure, self._do(plan, pool, self._check_copy, held_by(plan, self._me), failure)
            if plan.source == "durable":
                return failure, self._do(plan, pool, self._materialise, ranks, failure)
            mine = [fetch for fetch in plan.fetches if fetch.to_node == self._me]
            first = self._do(plan, pool, self._pull, mine, failure)
            # Only now: a slot that is here may borrow from one that was pulled.
            there = set(ranks) - {fetch.owner for fetch in mine}
            return failure, self._do(plan, pool, self._settle, sorted(there), failure) or first

    def _do(
        self, plan: RecoveryPlan, pool: concurrent.futures.Executor, job: Callable[[RecoveryPlan, Any], None],
        items: Iterable[Fetch | int], failure: _Failure,
    ) -> GeminiError | None:  # fmt: skip
        """Do `job` for each of these pulls or ranks; what went wrong goes into `failure`. Returns the first error."""
        first: GeminiError | None = None
        for future, what in [(pool.submit(job, plan, item), item) for item in items]:
            try:
                future.result()
            except (ReplicaCorrupt, PeerLost, DurableError) as error:
                first = first or error
                say(f"recovery of iteration {plan.iteration}: {error}; trying the next source")
                if plan.source == "durable":
                    failure.durable = True
                elif isinstance(what, Fetch):
                    failure.copies.append((what.from_node, what.owner, what.iteration))
                else:
                    failure.copies.append((self._me, what, plan.iteration or 0))
            except GeminiError as error:  # MemoryFull and its like: no other source helps
                first, failure.fatal = error, str(error)
        return first

    def _check_copy(self, plan: RecoveryPlan, owner: int) -> None:
        check_copy(self._memory, plan, owner)

    def _settle(self, plan: RecoveryPlan, owner: int) -> None:
        info = self._local(plan, owner)
        if info is None:
            raise ReplicaCorrupt(f"the slot of rank {owner} is gone from {self._memory.paths.slots}")
        settle_file(info.path)

    def _pull(self, plan: RecoveryPlan, fetch: Fetch) -> None:
        peer = self._nodes[fetch.from_node]
        began = time.monotonic()
        source = Source(peer.host, peer.port, peer.token, generation=self._number)
        pulled = pull_slot(self._memory, fetch.owner, fetch.iteration, source)
        if not on_course(pulled.header.round, pulled.header.iteration, plan.history):
            pulled.path.unlink(missing_ok=True)
            raise ReplicaCorrupt(f"node {peer.node_id} sent rank {fetch.owner} of an abandoned round")
        self._runtime.event(
            "fetch_done",
            round=self._number,
            owner=fetch.owner,
            iteration=fetch.iteration,
            **{"from": peer.node_id},
            bytes=pulled.bytes,
            ms=round((time.monotonic() - began) * 1e3, 3),
        )

    def _materialise(self, plan: RecoveryPlan, owner: int) -> None:
        from gemini_run.durable.checkpoint import materialise
        from gemini_run.durable.tier import open_tier

        assert plan.iteration is not None, "a durable plan names its iteration"
        if self._local(plan, owner) is not None:
            self._settle(plan, owner)
            return
        location = str(self._runtime.settings.durable)
        began = time.monotonic()
        path = materialise(open_tier(location), plan.iteration, owner, self._world_size, self._memory, self._number)
        self._runtime.event(
            "fetch_done",
            round=self._number,
            owner=owner,
            iteration=plan.iteration,
            **{"from": location},
            bytes=path.stat().st_size,
            ms=round((time.monotonic() - began) * 1e3, 3),
        )

    def _local(self, plan: RecoveryPlan, owner: int) -> SlotInfo | None:
        """The usable local slot of `owner` at the plan's iteration."""
        if plan.iteration is None or (self._me, owner, plan.iteration) in self._excluded:
            return None
        info = self._memory.find(owner, plan.iteration, self._world_size)
        header = info.header if info else None
        if header is None:
            return None
        return info if on_course(header.round, header.iteration, plan.history) else None

    # --- what is left behind ------------------------------------------------------------------------

    def _drop(self, copies: set[tuple[int, int]]) -> None:
        """Refuse those of these local slots (owner, iteration) that are bad indeed, so that no later round takes
        them. Where only the way to a peer failed the slot stays: this round plans without it."""
        for info in self._memory.scan():
            if not (info.usable and info.header and (info.header.owner, info.header.iteration) in copies):
                continue
            slot = Slot(info.path, writable=True)
            try:
                settle_file(info.path)
                slot.verify()
            except ReplicaCorrupt as error:
                say(f"slot refused: {error}")
                slot.refuse()
            with contextlib.suppress(BufferError):  # a view lives on in the error's traceback
                slot.close()

    def _refuse_off_course(self, history: History) -> None:
        self._refuse(lambda info: info.header and not on_course(info.header.round, info.header.iteration, history))

    def _refuse(self, which: Callable[[SlotInfo], Any]) -> None:
        for info in self._memory.scan():
            if info.usable and which(info):
                slot = Slot(info.path, writable=True)
                slot.refuse()
                slot.close()

    def _conclude(self, plan: RecoveryPlan, facts: Sequence[dict[str, Any]]) -> Outcome:
        """The plan holds on every node: leave nothing that contradicts it, and remember it."""
        start = plan.iteration or 0
        history = extend_history(plan.history, self._number, start)

        def superseded(info: SlotInfo) -> bool:
            header = info.header
            if header is None:
                return False
            return header.iteration > start or not on_course(header.round, header.iteration, history)

        self._refuse(superseded)
        # Slots of other worlds stay until the first commit of this one: what it goes on from may lack replicas.
        if plan.iteration is not None and plan.world_size != self._world_size:
            tell_workers(
                self._memory, plan, self._nodes, node_rank=self._me, number=self._number,
                durable=self._runtime.settings.durable,
            )  # fmt: skip
        finished, before, furthest = (
            max((int(said[what]) for said in facts), default=0) for what in ("finished", "start", "furthest")
        )
        if finished > before:
            furthest = finished
        else:  # the round before trained nothing, its workers may not even have restored
            finished, furthest = before, max(before, furthest)
        now = time.time()
        durable_at = self._runtime.durable_at = max((said["durable_at"] for said in facts), default=0.0) or now
        self._memory.save_notes(
            {
                **self._memory.notes(), "node_rank": self._me, "round": self._number, "history": history,
                "start": start, "furthest": furthest, "at": now, "durable_at": durable_at,
            }
        )  # fmt: skip
        self._tell_shortage(plan, facts)
        outcome = Outcome(plan, max(0, finished - start), max(0, furthest - start), self._source(plan))
        self._report(outcome, seen=any(said["slots"] for said in facts) or finished > 0)
        return outcome

    def _tell_shortage(self, plan: RecoveryPlan, facts: Sequence[dict[str, Any]]) -> None:
        """An event where nodes came or went and left shards with fewer copies than wanted: the workers make them anew
        with their first snapshot."""
        wanted = self._runtime.settings.copies_among(len(self._nodes))
        if self._me or wanted < 2 or plan.iteration is None:
            return
        health = memory_health(after_fetches(self._nodes_of(facts), plan.fetches), wanted)
        if health.replicated is None:
            short = [rank.rank for rank in health.ranks if len(rank.holders) < wanted]
            self._runtime.event(
                "replicas_degraded", round=self._number, iteration=plan.iteration, wanted=wanted,
                ranks=short or list(range(self._world_size)),
            )  # fmt: skip

    def _source(self, plan: RecoveryPlan) -> str:
        if plan.source != "memory":
            return plan.source
        if plan.copies:
            return "local" if len(held_by(plan, self._me)) == plan.world_size else "peer"
        return "peer" if any(fetch.to_node == self._me for fetch in plan.fetches) else "local"

    def _report(self, outcome: Outcome, *, seen: bool) -> None:
        plan = outcome.plan
        moved = plan.world_size != self._world_size
        if plan.source == "memory":
            pulled = [fetch for fetch in plan.fetches if fetch.to_node == self._me]
            where = "this node's memory"
            if pulled:
                peers = sorted({self._nodes[fetch.from_node].node_id for fetch in pulled})
                where = f"{len(pulled)} shard(s) pulled from the memory of {', '.join(peers)}"
            if plan.copies:
                where = f"in memory, taken with {plan.world_size} ranks and redistributed to {self._world_size}"
            say(
                f"round {self._number}: going on from iteration {plan.iteration}, {where}; "
                f"{outcome.behind} iteration(s) repeated"
            )
            return
        if plan.source == "none" and not seen:
            if self._me == 0 and self._number == 0:
                say("fresh start (no checkpoint found)")
            elif self._me == 0:
                say(
                    "starting again from scratch: no checkpoint was taken (a script is checkpointed once it uses "
                    "gemini_run.Checkpointer)"
                )
            return
        ranks = ",".join(map(str, plan.lost))
        what = f"all in-memory copies of rank(s) {ranks} are lost: " if ranks else ""
        if plan.source == "durable":
            say(
                f"{what or 'nothing newer in memory: '}every rank goes back to durable iteration {plan.iteration} "
                f"({outcome.behind} iterations lost)"
                + (f", redistributed from {plan.world_size} ranks to {self._world_size}" if moved else "")
            )
        else:
            say(f"{what}starting from scratch: no checkpoint found ({plan.reason}; {outcome.behind} iterations lost)")
        self._runtime.event(
            "fell_back",
            round=self._number,
            **{"from": plan.newest_seen},
            to=plan.iteration,
            source=plan.source,
            lost=plan.lost,
            lost_iterations=outcome.behind,
        )
