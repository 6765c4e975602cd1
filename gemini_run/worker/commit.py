"""The commit thread: seals a snapshot, replicates it to peers, and learns when every rank has done so.

Group commit: each rank counts itself in the round's store once its own slot and the replicas it receives are
complete; the last one publishes the record that rank 0 wrote, so one message tells everybody both that the
iteration is safe and which one is next. A rank always keeps its newest committed slots and writes only into
others, so at any moment there is an iteration that is complete everywhere.

Before that the ranks of a node compare what they hold (`worker.neighbours`). Where that leaves one rank's slot
without a copy of something, the iteration is *void*: every rank goes on, and the one before stays the newest.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from gemini_run.errors import GeminiError, MemoryFull
from gemini_run.memory.slots import Slot
from gemini_run.peers.transport import Exchange, Own
from gemini_run.plan.manifest import Manifest
from gemini_run.wire import (
    KEY_LEFT,
    CommitRecord,
    WorkerContext,
    key_commit,
    key_commit_count,
    key_commit_record,
    key_commit_void,
    key_node_count,
    key_node_done,
    key_node_torn,
)
from gemini_run.worker.interval import Intervals
from gemini_run.worker.late import Landing
from gemini_run.worker.neighbours import Borrowing, Neighbours
from gemini_run.worker.waiting import PATIENCE, wait_for


@dataclasses.dataclass(frozen=True)
class Job:
    """A snapshot handed over by the training thread.

    Attributes:
        slot: None: there was no room for one.
        restored: it is the one that this round went on from. Committing it first closes the gap that the failure
            left: it may lack replicas, and the one before must not be overwritten until it has them.
        landing: what is still on its way into the slot, None = nothing.
    """

    iteration: int
    slot: Slot | None
    manifest: Manifest
    restored: bool = False
    landing: Landing | None = None


class Schedule:
    """Rank 0's decisions: which iteration is snapshot next, and whether the durable tier wants it.

    Args:
        busy: whether a slot is still held for the durable tier. As long as it is, what is due there waits: every
            further one would take room of its own, without end where uploads are slower than their interval.
    """

    def __init__(
        self, context: WorkerContext, start: int, now: float, busy: Callable[[], bool] = lambda: False
    ) -> None:
        self._interval = self._following = context.snapshot_interval
        self._iterations = context.durable_iterations
        self._seconds = context.durable_seconds
        self._last_durable_at = context.durable_at or now
        self._due = False
        self._busy = busy
        # After a change of the world size there are only the old world's shards until the first snapshot.
        interval = 1 if context.reshard_from is not None else self._interval
        self.first = CommitRecord(start, start + interval, self._due_by_count(start, interval), self._following)

    def stretch(self, interval: int) -> None:
        """Iterations between snapshots from the next record on; never less than the context's."""
        self._interval = interval

    def again(self) -> None:
        """What was held for the durable tier came to nothing."""
        self._due = True

    def after(self, iteration: int, now: float) -> CommitRecord:
        """The record to publish with `iteration`."""
        interval = max(self._interval, self._following)  # the record before promised so much
        if self._due_by_count(iteration, interval) or (
            self._seconds is not None and now - self._last_durable_at >= self._seconds
        ):
            self._due = True
        durable = self._due and not self._busy()
        if durable:
            self._due, self._last_durable_at = False, now
        self._following = self._interval
        return CommitRecord(iteration, iteration + interval, durable, self._following)

    def _due_by_count(self, iteration: int, interval: int) -> bool:
        every = self._iterations
        return every is not None and (iteration + interval) // every > iteration // every


class Committer:
    """Owner of the commit thread. All methods are called from the training thread.

    Attributes:
        record: of the newest committed iteration; says what comes next.
        borrowing: what the next snapshot need not copy.
        problem: why checkpointing stopped, None while it works.
    """

    def __init__(
        self, *, rank: int, world_size: int, schedule: Schedule, connect: Callable[[], dist.Store],
        join_peers: Callable[[dist.Store, Own | None], Exchange | None], on_commit: Callable[[int], None],
        on_problem: Callable[[str], None], neighbours: Neighbours | None = None, node: int = 0,
        local_world_size: int = 1, on_parted: Callable[[int, tuple[str, ...], bool], None] = lambda *_: None,
        on_torn: Callable[[int, tuple[str, ...]], None] = lambda *_: None,
        on_full: Callable[[int, MemoryFull], None] = lambda *_: None,
        intervals: Intervals | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            intervals: None where the interval stays as it is.
            neighbours: the ranks of this node, None if this one is alone; `node` is the node's rank.
            on_parted: called, on the commit thread, with an iteration at which ranks of this node no longer hold
                alike what they did, the tensors' names, and whether the iteration is void here.
            on_torn: called, on the commit thread, with an iteration whose snapshot is dropped because these tensors of
                it changed while they were copied.
            on_full: called, on the commit thread, with an iteration for a replica of which there is no room here.
            connect: opens this thread's own connection to the round's store.
            join_peers: forms the checkpoint process group, at the first snapshot, which is given sealed, or None if it
                is torn (blocks for the other members).
            on_commit: called with each committed iteration, on the commit thread.
            on_problem: called once if checkpointing stops, on the commit thread.
        """
        self._rank = rank
        self._world_size = world_size
        self._schedule = schedule
        self._connect = connect
        self._join_peers = join_peers
        self._on_commit = on_commit
        self._on_problem = on_problem
        self._neighbours = neighbours
        self._node = node
        self._local_world_size = local_world_size
        self._on_parted = on_parted
        self._on_torn = on_torn
        self._on_full = on_full
        self._intervals = intervals
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._closing = False
        self._exchange: Exchange | None = None
        self._joined = False
        self._agreed: int | None = None  # the newest iteration whose keys are in the store
        self.record = schedule.first
        self.borrowing: Borrowing | None = None
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._main, name="gemini-commit", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand a snapshot over. The previous one must be committed (`wait`)."""
        with self._changed:
            if self._job is not None:
                raise RuntimeError(f"iteration {self._job.iteration} is still being committed")
            self._job = job
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending. False if `timeout` (seconds) ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None or self.problem is not None, timeout)

    def earliest(self) -> int:
        """The first iteration at which a snapshot can be due, by what this rank knows now."""
        with self._changed:
            record, job = self.record, self._job
            pending = job is not None and job.iteration == record.next_iteration
            return record.next_iteration + (record.following if pending else 0)

    def close(self, timeout: float) -> bool:
        """Wait for the pending commit, tell the other ranks that this one makes no more, end the thread."""
        done = self.wait(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(min(timeout, 5.0))
        return done and self.problem is None

    # --- commit thread ------------------------------------------------------------------------------

    def _main(self) -> None:
        store: dist.Store | None = None
        try:
            if self._world_size > 1:
                store = self._connect()
                if self._intervals is not None:
                    self._intervals.open(store)
            while (job := self._next()) is not None:
                self._commit(job, store)
        except (GeminiError, RuntimeError, OSError) as error:
            # RuntimeError: what c10d's stores and groups raise when the other side is gone.
            with self._changed:
                self.problem = str(error).split("\n", 1)[0] or type(error).__name__
                self._changed.notify_all()
            self._on_problem(self.problem)
        if store is not None:
            try:
                store.add(KEY_LEFT, 1)  # after a problem as well: the others would wait for this rank
            except RuntimeError:
                pass  # the round is over and its store gone: nobody is left to wait for this rank

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._job is not None or self._closing)
            return self._job

    def _commit(self, job: Job, store: dist.Store | None) -> None:
        own = self._arrived(job)
        if store is not None and not self._joined:
            self._exchange, self._joined = self._join_peers(store, own), True
        borrowing = None
        if store is not None and self._neighbours is not None:
            if self._meet_neighbours(job.iteration, store, torn=own is None):
                own = None
            elif own is not None:
                verdict = self._neighbours.compare(own.slot, own.header, own.manifest)
                borrowing = verdict.borrowing
                if verdict.parted:
                    self._on_parted(job.iteration, verdict.parted, verdict.void)
                if verdict.void:
                    own = None
        void = own is None
        if (exchange := self._exchange) is not None:
            restored = own if job.restored else None
            keep = self.record.iteration
            done = exchange.renew(restored) if restored else exchange.run(own, job.iteration, keep=keep)
            void |= done.void
            if done.full is not None:
                self._on_full(job.iteration, done.full)
        if job.slot is not None:
            job.slot.unlock()
        record = self._agree(job.iteration, store, void=void)
        if own is None and job.slot is not None:  # only now: until all have agreed the neighbours read its checksums
            job.slot.refuse()
        if record.void and not job.restored:
            self._unhold(job)
        with self._changed:
            self.record = record
            self.borrowing = borrowing
            self._job = None
            self._changed.notify_all()
        if not record.void:
            self._on_commit(job.iteration)

    def _unhold(self, job: Job) -> None:
        """The durable tier cannot have this one: the next will do."""
        if self.record.next_durable:
            self._schedule.again()
            if job.slot is not None:
                job.slot.set_hold(False)

    def _arrived(self, job: Job) -> Own | None:
        """The slot of `job`, sealed, once all of it is there; None where it will never be whole."""
        if job.slot is None:
            return None
        torn = tuple(name for _, name in job.landing.finish()) if job.landing is not None else ()
        if torn:
            self._on_torn(job.iteration, torn)
            return None
        header = job.slot.header()
        if not header.sealed:
            job.slot.seal(job.manifest, header)
            header = job.slot.header()
        return Own(job.slot, header, job.manifest)

    def _meet_neighbours(self, iteration: int, store: dist.Store, *, torn: bool) -> bool:
        """Wait until every rank of this node has its slot of `iteration`; says whether any is `torn`, alike to all."""
        done, torn_key = key_node_done(self._node, iteration), key_node_torn(self._node, iteration)
        if torn:  # before counting
            store.add(torn_key, 1)
        if store.add(key_node_count(self._node, iteration), 1) == self._local_world_size:
            store.set(done, str(store.add(torn_key, 0)))
        else:
            self._wait_for(done, iteration, store)
        return int(store.get(done)) > 0

    def _agree(self, iteration: int, store: dist.Store | None, *, void: bool) -> CommitRecord:
        if store is None:
            record = self._schedule.after(iteration, time.time())
            return self._void(record) if void else record
        if self._intervals is not None:
            self._intervals.ask(self.record.following, store)
            if self._rank == 0:
                self._schedule.stretch(self._intervals.decide(store))
        if self._rank == 0:
            # Before counting: whoever counts last finds the record there.
            store.set(key_commit_record(iteration), self._schedule.after(iteration, time.time()).to_json())
        if void:  # before counting, too
            store.add(key_commit_void(iteration), 1)
        if store.add(key_commit_count(iteration), 1) == self._world_size:
            record = CommitRecord.from_json(store.get(key_commit_record(iteration)))
            if store.add(key_commit_void(iteration), 0) > 0:
                record = self._void(record)
            store.set(key_commit(iteration), record.to_json())
        else:
            self._wait_for(key_commit(iteration), iteration, store)
            record = CommitRecord.from_json(store.get(key_commit(iteration)))
        self._forget(iteration, store)
        return record

    def _void(self, record: CommitRecord) -> CommitRecord:
        """`record`, with the one before as the newest committed iteration."""
        return dataclasses.replace(record, iteration=self.record.iteration, void=True)

    def _forget(self, iteration: int, store: dist.Store) -> None:
        """Remove the keys of the iteration that was agreed on before this one: all have read them, having counted
        themselves since."""
        previous, self._agreed = self._agreed, iteration
        if previous is None or previous == iteration:
            return
        keys = []
        if self._rank == 0:
            keys += [key_commit_count(previous), key_commit_record(previous), key_commit(previous)]
            keys += [key_commit_void(previous)]
        if self._neighbours is not None and self._neighbours.first:
            keys += [key_node_count(self._node, previous), key_node_done(self._node, previous)]
            keys += [key_node_torn(self._node, previous)]
        for key in keys:
            store.delete_key(key)

    def _wait_for(self, key: str, iteration: int, store: dist.Store) -> None:
        def counted() -> str:
            return f"{store.add(key_commit_count(iteration), 0)} of {self._world_size} ranks"

        wait_for(
            [key],
            store,
            left=lambda: (
                f"another rank ended, or stopped taking snapshots, before iteration {iteration} "
                f"({counted()} reached it)"
            ),
            late=lambda: (
                f"iteration {iteration} is complete on only {counted()} after {PATIENCE.total_seconds():.0f} s: every "
                "rank must call step() for every iteration"
            ),
        )
