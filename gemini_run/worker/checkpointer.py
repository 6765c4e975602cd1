"""The explicit API: `Checkpointer`. Everything automatic is built on it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from gemini_run.errors import DurableError, GeminiError, MemoryFull, PeerLost, ReplicaCorrupt
from gemini_run.memory.segment import remove_surplus
from gemini_run.peers.transport import Exchange, Own
from gemini_run.terminal import say
from gemini_run.wire import EXIT_FATAL, EXIT_REPLAN, MemoryPaths, WorkerContext
from gemini_run.worker.arguments import components_of
from gemini_run.worker.beacon import Progress
from gemini_run.worker.bootstrap import record_imports
from gemini_run.worker.buckets import Buckets
from gemini_run.worker.capture import Snapshotter
from gemini_run.worker.commit import Committer, Job, Schedule
from gemini_run.worker.joining import Joining, holdings
from gemini_run.worker.neighbours import Neighbours
from gemini_run.worker.restore import Restored, restore
from gemini_run.worker.traffic import ReplicaTraffic
from gemini_run.worker.waiting import PATIENCE

_CLOSE_SECONDS = 60.0
_STOPPED_SECONDS = 10.0  #: until the end of snapshots is said on the terminal
_NOTICE_SECONDS = 30.0


class Checkpointer:
    """Checkpoints the training state at every iteration, and brings it back after a failure.

    Pass everything that training changes, under names of your choice: modules, optimizers, schedulers, gradient
    scalers, data loaders, random generators, dicts and lists of plain values, any object with
    `state_dict()`/`load_state_dict()`. A `DataLoader` is followed from here on: iterators made after this count the
    batches that the training loop takes, and after a restart the first one goes on behind them. The random number
    generators of torch, numpy and Python are always included. Every rank makes one, with the same names::

        ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in ckpt.steps(total):        # goes on at the right step after a restart
            ...one full iteration, scheduler and scaler included...

    or, with a loop of your own: ``start = ckpt.restore()``, then ``ckpt.step()`` at the end of each iteration.

    Outside gemini-run (plain ``python`` or ``torchrun``) the same calls do nothing but count.
    """

    def __init__(self, **objects: Any) -> None:
        """
        Raises:
            ConfigError: an argument cannot be checkpointed; the message says what to pass instead.
        """
        self._iteration = 0
        self._ready = False
        self._closed = False
        self._context = WorkerContext.from_env()
        # Buckets first: laying them out runs a backward, which nothing restored before may see.
        self._loader = objects.get("loader")
        self._components = [Buckets(objects), *components_of(objects)]
        if self._context is None:
            return
        for component in self._components:
            component.attach()
        self._rank = int(os.environ["RANK"])
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        self._paths = MemoryPaths(Path(self._context.memory_dir))
        self._progress = Progress(self._context, self._rank, self._local_rank)
        self._snapshotter = Snapshotter(
            self._components, self._paths, owner=self._rank, world_size=self._world_size,
            local_world_size=self._local_world_size, round=self._context.round,
            replicas=self._context.replicas,
            durable=(self._context.durable_iterations, self._context.durable_seconds) != (None, None),
            late_copy=self._context.late_copy,
        )  # fmt: skip
        self._joining = Joining(
            self._context, rank=self._rank, local_rank=self._local_rank, local_world_size=self._local_world_size
        )
        self._notice: threading.Timer | None = None
        self._said_late = False
        self._full_since: int | None = None
        self._has_committed = False
        self._committer: Committer | None = None
        self._traffic = ReplicaTraffic(self._context, self._rank, self._progress)

    @property
    def iteration(self) -> int:
        """Iterations finished so far."""
        return self._iteration

    @property
    def loader(self) -> Any:
        """The object given as ``loader=``, itself.

        Raises:
            AttributeError: none was given.
        """
        if self._loader is None:
            raise AttributeError("Checkpointer.loader: no loader= was given")
        return self._loader

    def restore(self) -> int:
        """Load the newest state into the live objects, in place, bit for bit.

        Call it once everything that was passed exists, right before the loop. Later calls change nothing.

        Returns:
            The number of finished iterations: 0 on a fresh start, else where to go on.
        """
        if self._ready:
            return self._iteration
        self._ready = True
        if self._context is None:
            return 0
        try:
            self._begin(self._context)
        except (ReplicaCorrupt, PeerLost, DurableError) as error:
            self._replan(error)
        except GeminiError as error:
            self._fatal(error)
        return self._iteration

    def step(self) -> None:
        """Mark the end of one iteration, after optimizer, scheduler and scaler. Every rank calls it.

        Once this returns the state of this iteration is safe from the death of any worker; where it is copied late
        (state on GPUs, ``--late-copy always``), before the next optimizer step.
        """
        if not self._ready:
            self.restore()
        self._iteration += 1
        if self._context is None or self._closed:
            return
        if self._iteration == self._start + 1:
            self._progress.update(iteration=self._iteration, first_step_at=time.time())
        else:
            self._progress.update(iteration=self._iteration)
        self._traffic.boundary()
        try:
            self._boundary()
        except GeminiError as error:
            self._fatal(error)
        self._traffic.resume(self._committer)

    def steps(self, total: int) -> Iterator[int]:
        """The steps still to do out of `total`, with a boundary after each: restores first.

        Yields:
            The index of each step, ``restored iteration`` to ``total - 1``.
        """
        for step in range(self.restore(), total):
            yield step
            self.step()

    def close(self) -> None:
        """Wait until the last snapshot is complete on every rank. Called at exit by itself."""
        if self._closed or self._context is None or self._committer is None:
            return
        self._closed = True
        self._traffic.close()
        # After an exception the other ranks may never come: do not hold up the report of it.
        crashed = getattr(sys, "last_value", None) is not None
        if not self._committer.close(1.0 if crashed else _CLOSE_SECONDS) and not crashed:
            say(
                f"warning: rank {self._rank} ended before iteration {self._iteration} was complete on every "
                f"rank; the newest complete one is {self._committer.record.iteration}"
            )
        if self._notice is not None and self._notice.is_alive() and not crashed:
            self._notice.cancel()
            self._notice.function()
        self._snapshotter.late.close()
        self._progress.update(phase="finished")

    # --- inside gemini-run ----------------------------------------------------------------------------

    def _begin(self, context: WorkerContext) -> None:
        found: Restored | None = None
        if context.reshard_from is not None:
            self._progress.update(phase="restoring")
            self._reshard(context)
        elif context.restore_iteration is not None:
            self._progress.update(phase="restoring")
            found = restore(self._components, self._paths, owner=self._rank, iteration=context.restore_iteration)
            self._iteration = found.iteration
            self._snapshotter.slots.adopt(found.index, found.slot, found.iteration)
            self._progress.event(
                "restored", iteration=found.iteration, source=context.restore_source,
                bytes=found.num_bytes, ms=round(1e3 * found.seconds, 3),
            )  # fmt: skip
        self._start = self._iteration
        # A job that has something to lose goes on without further checkpoints rather than end.
        self._snapshotter.preflight(strict=self._start == 0)
        # Threads start here and not before: restoring may be the script's first use of torch.
        self._committer = Committer(
            rank=self._rank, world_size=self._world_size,
            schedule=Schedule(context, self._start, time.time(), self._durable_busy),
            connect=self._connect, join_peers=self._join_peers,
            on_commit=self._committed, on_problem=self._stopped, neighbours=self._neighbours(),
            node=context.node_rank, local_world_size=self._local_world_size, on_parted=self._parted,
            on_torn=self._torn, on_full=self._no_room,
            intervals=self._traffic.intervals,
        )  # fmt: skip
        if found is not None:
            self._committer.submit(Job(found.iteration, found.slot, found.manifest, restored=True))
        self._progress.update(
            phase="training", iteration=self._iteration, snapshot=self._iteration, committed=self._iteration
        )
        atexit.register(self.close)

    def _reshard(self, context: WorkerContext) -> None:
        from gemini_run.worker.reshard import restore_resharded  # pulls in the durable tier

        made = restore_resharded(self._components, self._paths, rank=self._rank, round=context.round)
        self._iteration = made.iteration
        self._snapshotter.spare(made.iteration)
        self._progress.event(
            "restored", iteration=made.iteration, source=context.restore_source, bytes=made.num_bytes,
            ms=round(1e3 * made.seconds, 3), from_world_size=made.world_size,
        )  # fmt: skip

    def _committed(self, iteration: int) -> None:
        """On the commit thread: `iteration` is complete on every rank."""
        self._room_again(iteration)
        if not self._has_committed:
            self._has_committed = True
            record_imports()
            if self._local_rank == 0:
                remove_surplus(self._paths, self._joining.written_here())
            context = self._context
            if self._rank == 0 and context is not None and context.replicas > 1 and context.round > 0:
                self._progress.event("replicas_complete", iteration=iteration, copies=context.replicas)
        record = self._committer.record if self._committer is not None else None
        self._progress.committed(iteration, record.following if record is not None else 0)

    def _boundary(self) -> None:
        for component in self._components:
            component.boundary()
        committer = self._committer
        if committer is None or committer.problem is not None:
            return
        if self._iteration < committer.earliest():
            return
        started = time.perf_counter()
        self._traffic.urge()
        if not committer.wait(_NOTICE_SECONDS):
            say(
                f"rank {self._rank} has waited {_NOTICE_SECONDS:.0f} s for the other ranks to finish the "
                f"snapshot before iteration {self._iteration}: is step() called on every rank?"
            )
            committer.wait()
        self._traffic.waited(time.perf_counter() - started)
        record = committer.record
        if committer.problem is not None or self._iteration < record.next_iteration:
            return
        self._progress.update(phase="snapshot")
        try:
            slot = self._snapshotter.snapshot(
                self._iteration, keep=record.iteration, hold=record.next_durable, borrowing=committer.borrowing
            )
        except MemoryFull as error:  # training goes on, and so does every other rank
            self._no_room(self._iteration, error)
            committer.submit(Job(self._iteration, None, self._snapshotter.manifest))
            self._progress.update(phase="training")
            return
        committer.submit(Job(self._iteration, slot, self._snapshotter.manifest, landing=self._snapshotter.landing))
        self._progress.update(
            phase="training", snapshot=self._iteration, stall=time.perf_counter() - started,
            state_bytes=self._snapshotter.state_bytes,
        )  # fmt: skip

    def _durable_busy(self) -> bool:
        """Asked on the commit thread of rank 0 when a checkpoint is due in the durable tier."""
        busy = self._snapshotter.slots.holding()
        if busy and not self._said_late:
            self._said_late = True
            say(
                f"durable tier: iteration {self._iteration} would be due, and the one before is still being stored; "
                "the next goes when that is done (a longer --durable-interval, or a faster tier, keeps up)"
            )
            self._progress.event("persist_late", iteration=self._iteration)
        return busy

    def _connect(self) -> dist.Store:
        context = self._context
        if context is None:
            raise RuntimeError("outside gemini-run there is no store")
        return dist.TCPStore(
            context.store_host, context.store_port, is_master=False, wait_for_workers=False,
            timeout=timedelta(minutes=5),
        )  # fmt: skip

    def _join_peers(self, store: dist.Store, own: Own | None) -> Exchange | None:
        """On the commit thread, with the round's first snapshot."""
        context = self._context
        if context is None:
            return None
        held = None if own is None else holdings(own.slot, own.manifest, self._private())
        peers = self._joining.join(store, held)
        if peers is None:
            return None
        return Exchange(peers, self._paths, round=context.round, timeout=PATIENCE, pace=self._traffic.pace)

    def _private(self) -> tuple[str, ...]:
        """How the names of tensors begin that are each rank's own."""
        return tuple(f"{component.name}." for component in self._components if component.private)

    def _neighbours(self) -> Neighbours | None:
        if self._local_world_size < 2:
            return None
        first = self._rank - self._local_rank
        owners = range(first, first + self._local_world_size)
        return Neighbours(self._paths, owner=self._rank, owners=owners, private=self._private())

    def _parted(self, iteration: int, names: tuple[str, ...], void: bool) -> None:
        """Ranks of this node held these tensors alike, and do not any more."""
        self._progress.event("replicas_disagree", iteration=iteration, tensors=list(names[:20]), void=void)
        if self._local_rank:
            return  # one line for the node
        last = self._rank + self._local_world_size - 1
        say(
            f"warning: ranks {self._rank} to {last} held {_some(names)} alike and differ there since iteration "
            f"{iteration}: silent data corruption, unless the script lets its ranks go apart (from here on each rank's "
            "own is kept)"
        )

    def _torn(self, iteration: int, names: tuple[str, ...]) -> None:
        """These tensors changed between the boundary and the end of their late copy."""
        self._snapshotter.late.changed(names)
        self._progress.event("late_copy_torn", iteration=iteration, tensors=list(names[:20]))
        say(
            f"rank {self._rank}: {_some(names)} changed after step() and before the optimizer's step: the snapshot "
            f"of iteration {iteration} is dropped, and they are copied within step() from here on"
        )

    def _no_room(self, iteration: int, error: MemoryFull) -> None:
        """The snapshot of `iteration`, or a replica of it, does not fit into this node's memory: said once until there
        is room again."""
        if self._full_since is not None:
            return
        self._full_since = iteration
        newest = self._committer.record.iteration if self._committer is not None else self._start
        self._progress.event(
            "memory_full", iteration=iteration, newest=newest, needed_bytes=error.needed_bytes,
            free_bytes=error.free_bytes,
        )  # fmt: skip
        say(
            f"warning: rank {self._rank}: no room for the snapshot of iteration {iteration}; training goes on, the "
            f"newest checkpoint stays iteration {newest}, and every further one is tried again: {error}"
        )

    def _room_again(self, iteration: int) -> None:
        if self._full_since is None:
            return
        self._full_since = None
        self._progress.event("memory_free", iteration=iteration)
        say(f"rank {self._rank}: there is room again; iteration {iteration} is checkpointed")

    def _stopped(self, reason: str) -> None:
        self._progress.event("snapshots_stopped", iteration=self._iteration, reason=reason)
        text = (
            f"warning: rank {self._rank} takes no more snapshots in this round after iteration "
            f"{self._iteration}: {reason}"
        )
        # Nearly always a peer has just died and the round ends within a second: then this is no news.
        self._notice = threading.Timer(_STOPPED_SECONDS, lambda: say(text))
        self._notice.daemon = True
        self._notice.start()

    def _replan(self, error: GeminiError) -> NoReturn:
        self._progress.event("replica_refused", reason=str(error))
        say(f"rank {self._rank} refuses its checkpoint, the next source is taken: {error}")
        _leave(EXIT_REPLAN)

    def _fatal(self, error: GeminiError) -> NoReturn:
        self._progress.event("worker_error", error=type(error).__name__, reason=str(error))
        # Into the file where torch's agents look for a worker's exception: ours ends the run with this line.
        get_error_handler().record_exception(error)
        _leave(EXIT_FATAL)


def _some(names: tuple[str, ...]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _leave(code: int) -> NoReturn:
    """End this process at once: peers may be inside collectives, and nothing here is worth finishing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
