"""Our agent: torch's LocalElasticAgent with its waiting, stopping, restart budget and exit barrier replaced.

The only file that touches torch's private elastic hooks; tests/contracts/test_torch_hooks.py pins them. torch's
own loop (``_invoke_run``) stays in charge: what it sees decides what it does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import select
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from gemini_run.agent.failure import RestartBudget, WorkerFailure, suspicion
from gemini_run.agent.preimported import StartRequest
from gemini_run.agent.process import WorkerProcess, readable
from gemini_run.agent.zygote import WorkerStarter
from gemini_run.errors import GeminiError
from gemini_run.memory.beacons import read_beacons
from gemini_run.plan.recovery import worker_ranks
from gemini_run.terminal import say
from gemini_run.wire import ENV_WORKER, EXIT_FATAL, EXIT_REPLAN

if TYPE_CHECKING:
    from gemini_run.agent.rendezvous import GeminiRendezvous
    from gemini_run.agent.runtime import NodeRuntime
    from gemini_run.agent.signals import Forwarder
    from gemini_run.agent.state import AgentState

ENV_GENERATION = "GEMINI_RESTART_GENERATION"  #: the round's number, equal on all nodes
POLL_INTERVAL = 0.001  #: seconds torch's loop sleeps a turn; the waiting is done in `_monitor_workers`

_SHUTDOWN_TIMEOUT = 30  #: seconds, torch's own default
#: newer torch: `--shutdown-timeout`, and no end of the rendezvous with every stop of workers
_TAKES_TIMEOUT = "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters
_NEWS_SECONDS = 0.2  #: longest wait for a worker's end or a peer's news before torch's loop turns once more
_RESTART_GRACE = 2  #: seconds between SIGTERM and SIGKILL before a restart: survivors hang in collectives
_PEER_NEWS_SECONDS = 0.1  #: how long a worker's exception waits for news of a peer that may have caused it
_LEAVE_SECONDS = 5.0  #: how long the store's host waits at the end until the others have read it
_KEY_FINISHED = "gemini/finished"  #: counter in the round's store: nodes whose workers succeeded
_KEY_LEAVING = "gemini/leaving"  #: counter: nodes that saw all finished and need the store no more


class GeminiAgent(LocalElasticAgent):
    """Runs the workers of one node through all rounds of a run.

    Args:
        spec: torch's description of the workers; its rendezvous handler is `rendezvous`.
        runtime: this node.
        rendezvous: the handler that plans recovery before it lets a round begin.
        starter: starts the workers.
        state: kept up to date for the node's status.
        signals: passes signals on to the workers.
        on_round: called after each rendezvous, before the workers start.
        on_start: called once they have started.
    """

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str,
        log_line_prefix_template: str | None,
        shutdown_timeout: int | None,
        runtime: NodeRuntime,
        rendezvous: GeminiRendezvous,
        starter: WorkerStarter,
        state: AgentState,
        signals: Forwarder,
        on_round: Callable[[], None],
        on_start: Callable[[], None],
    ) -> None:
        patience = _SHUTDOWN_TIMEOUT if shutdown_timeout is None else shutdown_timeout
        timeout: dict[str, Any] = {"shutdown_timeout": patience} if _TAKES_TIMEOUT else {}
        super().__init__(
            spec,
            logs_specs=logs_specs,
            start_method=start_method,
            log_line_prefix_template=log_line_prefix_template,
            **timeout,
        )
        self._patience = patience
        self.grace: float = patience  #: seconds from a worker's death signal to SIGKILL
        self._runtime = runtime
        self._rendezvous_handler = rendezvous
        self._starter = starter
        self._state = state
        self._signals = signals
        self._on_round = on_round
        self._on_start = on_start
        self._budget = RestartBudget(spec.max_restarts)
        self.fatal: GeminiError | None = None  #: what a worker said that no restart can mend
        self._finished: RunResult | None = None  #: this node's workers succeeded; peers may still train
        self._restarting = False

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            result: RunResult = super()._invoke_run(role)
            return result
        except SignalException:
            self._signals.turn()  # one that came just before (Slurm sends such a warning) comes first
            self._rendezvous_handler.leave()  # before the workers are stopped: that may take its time
            raise

    # --- starting ----------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._state.phase = "rendezvous"
        self._starter.reap()
        self._finished = None
        super()._rendezvous(worker_group)
        round_info = self._rendezvous_handler.round
        if round_info is None:
            raise RuntimeError("the rendezvous returned without a round")
        if round_info.number > 0:
            # Under a static rendezvous torch would give the workers --master-port again: in the store behind it the
            # dead ranks' addresses still lie.
            worker_group.master_addr = round_info.store_host  # type: ignore[assignment]  # declared as None
            worker_group.master_port = round_info.store_port  # type: ignore[assignment]
        # torch numbers attempts per agent (max_restarts - remaining) and deletes the log folder of a number that
        # comes again. The round's number is the same on all nodes and never comes again.
        worker_group.spec.max_restarts = self._remaining_restarts + round_info.number
        self._state.round = round_info.number
        self._on_round()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """As torch does, from what the agents told each other when the round was formed. torch asks through the store
        once more, and waits there, deaf to everything, for a node that has died since."""
        round_info = self._rendezvous_handler.round
        if round_info is None:
            raise RuntimeError("ranks are asked for outside a round")
        nodes = [(node.local_world_size, node.role) for node in round_info.nodes]
        first, world_size, first_of_role, role_world_size = worker_ranks(nodes, group_rank)
        return [
            Worker(
                local_rank=local_rank,
                global_rank=first + local_rank,
                role_rank=first_of_role + local_rank,
                world_size=world_size,
                role_world_size=role_world_size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _replaced("get_subprocess_handler", functools.partial(_WorkerHandler, self)), _signals_put_off():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        self._state.workers = {
            worker.local_rank: (worker.global_rank, pids[worker.local_rank]) for worker in worker_group.workers
        }
        processes = self._processes()
        self._signals.workers_started(
            {worker.global_rank: processes[worker.local_rank] for worker in worker_group.workers}
        )
        self._state.phase = "running"
        self.grace = _RESTART_GRACE
        self._on_start()
        return pids

    def start_worker(
        self, args: tuple[str, ...], env: dict[str, str], stdout: IO[Any] | None, stderr: IO[Any] | None
    ) -> WorkerProcess:
        """Start one worker of the present round; called by torch through `_WorkerHandler`."""
        round_info = self._rendezvous_handler.round
        if round_info is None:
            raise RuntimeError("a worker is started outside a round")
        env = {
            **env,
            ENV_WORKER: self._rendezvous_handler.worker_context().to_json(),
            ENV_GENERATION: str(round_info.number),
            "TORCHELASTIC_MAX_RESTARTS": str(self._budget.limit),
        }
        return self._starter.start(StartRequest(args, env, stdout, stderr))

    # --- watching ----------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_news(_NEWS_SECONDS)
        self._signals.turn()
        if self._finished is not None:
            return self._await_peers(self._finished)
        failure = self._first_failure(worker_group)
        if failure:
            self._judge(failure)  # before torch stops the survivors: peers need not wait for that
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and not failure and (failure := self._first_failure(worker_group)):
            self._judge(failure)  # it failed between the two looks
        self._note_ended()
        if result.state == WorkerState.HEALTHY:
            self._starter.prepare()
        if result.state == WorkerState.SUCCEEDED:
            self._finished = result
            self._state.phase = "finished"
            self._count_in_store(_KEY_FINISHED, 1)
            return self._await_peers(result)
        return result

    def _wait_for_news(self, seconds: float) -> bool:
        """Block until a worker ended or the rendezvous has news of a peer, at most `seconds`. True on peer news."""
        poller = select.poll()
        wake = self._rendezvous_handler.wake_fd
        poller.register(wake, select.POLLIN)
        for process in self._processes().values():
            if process.returncode is None:
                poller.register(process.pidfd, select.POLLIN)
        return any(descriptor == wake for descriptor, _ in poller.poll(seconds * 1e3))

    def _processes(self) -> dict[int, WorkerProcess]:
        """Local rank -> worker of this round."""
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return {}
        return {
            rank: handler.proc
            for rank, handler in context.subprocess_handlers.items()
            if isinstance(handler, _WorkerHandler)
        }

    def _first_failure(self, worker_group: WorkerGroup) -> WorkerFailure | None:
        """The failed worker that most likely failed first: a killed one, before one that then lost its peer, before
        one that was told to stop."""
        failed = [
            (local_rank, process, code)
            for local_rank, process in self._processes().items()
            if (code := process.poll()) not in (None, 0)
        ]
        if not failed:
            return None
        local_rank, process, code = min(failed, key=lambda entry: suspicion(entry[2] or 0))
        beacons = read_beacons(self._runtime.memory.paths)
        pids = {process.pid for process in self._processes().values()}
        iterations = [beacon.iteration for beacon in beacons.values() if beacon.pid in pids]
        return WorkerFailure(
            rank=worker_group.workers[local_rank].global_rank,
            local_rank=local_rank,
            pid=process.pid,
            exitcode=code or 0,
            exception=self._exception_of(local_rank),
            iteration=max(iterations, default=None),
        )

    def _exception_of(self, local_rank: int) -> str | None:
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return None
        try:
            with open(context.error_files[local_rank], encoding="utf-8") as file:
                message = json.load(file)["message"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # no file (a signal, sys.exit), or one of another shape
        return str(message["message"] if isinstance(message, dict) else message)

    def _judge(self, failure: WorkerFailure) -> None:
        """Decide whether torch's loop may restart after `failure`, and tell everyone who waits on it."""
        # A worker whose peer was lost fails too, a moment later: that is the peer's failure, not one of its own.
        ours = failure.exitcode in (EXIT_REPLAN, EXIT_FATAL)
        consequence = failure.exitcode > 0 and not ours and self._peer_failed()
        # A refused slot is refused for good, so that this ends by itself; shards of another world are not.
        free = failure.exitcode == EXIT_REPLAN and not self._resharded()
        restart = consequence or free
        if failure.exitcode == EXIT_FATAL:
            _, _, reason = (failure.exception or "see its log").partition(": ")
            self.fatal = GeminiError(f"rank {failure.rank}: {reason or failure.exception}")
        elif not restart:
            restart = self._budget.charge(failure)
        self._runtime.event(
            "worker_failed",
            rank=failure.rank,
            local_rank=failure.local_rank,
            pid=failure.pid,
            exitcode=failure.exitcode,
            signal=failure.signal_name,
            cause=failure.cause,
            iteration=failure.iteration,
            consequence=consequence,
        )
        self._state.last_failure = str(failure)
        self._state.restarts_left = self._budget.left
        if restart:
            say(f"{failure}{', its peer having failed' if consequence else ''}; recovering")
            if not consequence:
                self._rendezvous_handler.announce_failure()
        elif self.fatal is None:  # that one ends the run with a line of its own
            say(f"{failure}; giving up: {self._budget.hopeless or self._spent()}")
        # torch's loop takes one and restarts if it found any: one is granted for each allowed restart.
        self._remaining_restarts = 1 if restart else 0
        self.grace = _RESTART_GRACE if restart else self._patience

    def _resharded(self) -> bool:
        present = self._rendezvous_handler.round
        return present is not None and present.resharded

    def _num_nodes(self) -> int:
        return self._worker_group.group_world_size or 1

    def _peer_failed(self) -> bool:
        if self._num_nodes() == 1:
            return False
        end = time.monotonic() + _PEER_NEWS_SECONDS
        while (left := end - time.monotonic()) > 0:
            if readable(self._rendezvous_handler.wake_fd, left):
                return True
        return False

    def _spent(self) -> str:
        limit = self._budget.limit
        return f"no restart left of --max-restarts {limit}" if limit else "--max-restarts is 0"

    def _note_ended(self) -> None:
        for process in self._processes().values():
            if process.returncode is not None:
                self._starter.ended(process)

    # --- stopping ----------------------------------------------------------------------------------

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._restarting = True
        try:
            super()._restart_workers(worker_group)
        finally:
            self._restarting = False

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        # Older torch says `is_restart`; our own flag says the same in all.
        self._shutdown(timeout=_RESTART_GRACE if self._restarting else self._patience)
        self._note_ended()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None, is_restart: bool = False
    ) -> None:
        self.grace = self._patience if timeout is None else timeout
        if _TAKES_TIMEOUT:
            super()._shutdown(death_sig, int(self.grace))
        else:  # which else also shuts down the rendezvous, for all nodes
            super()._shutdown(death_sig, is_restart=True)  # type: ignore[call-arg]
        self._note_ended()

    # --- the end -----------------------------------------------------------------------------------

    def _await_peers(self, result: RunResult) -> RunResult:
        """Success once all nodes succeeded. Until then torch's loop sees healthy workers, and so still takes part
        when a peer fails: the workers start again, restore the last iteration and finish at once."""
        if self._count_in_store(_KEY_FINISHED, 0) >= self._num_nodes():
            return result
        return RunResult(state=WorkerState.HEALTHY)

    def _count_in_store(self, key: str, amount: int) -> int:
        """Add to a counter of the round's store. 0 where the store is gone: its host failed, and the rendezvous
        will say so."""
        if self._num_nodes() == 1 or self._store is None:
            return 1
        try:
            return int(self._store.add(key, amount))
        except RuntimeError:  # torch.distributed.DistError and its kin
            return 0

    def _exit_barrier(self) -> None:
        """All nodes have finished (`_await_peers`). The store's host stays until the others know it as well."""
        self._count_in_store(_KEY_LEAVING, 1)
        if self._worker_group.group_rank != 0:
            return
        end = time.monotonic() + _LEAVE_SECONDS
        while self._count_in_store(_KEY_LEAVING, 0) < self._num_nodes():
            if time.monotonic() > end:
                return
            time.sleep(0.02)


class _WorkerHandler(SubprocessHandler):
    """torch's handle on one worker, started and stopped our way."""

    proc: WorkerProcess  # type: ignore[assignment]  # what torch uses of a Popen, it has

    def __init__(self, agent: GeminiAgent, **arguments: Any) -> None:
        self._agent = agent
        super().__init__(**arguments)

    def _popen(  # type: ignore[override]
        self, args: tuple[str, ...], env: dict[str, str]
    ) -> WorkerProcess:
        return self._agent.start_worker(args, env, self._stdout, self._stderr)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        # torch waits a fixed 30 s after this in one place; the process's own deadline cuts that short.
        self.proc.stop(death_sig or signal.SIGTERM, self._agent.grace)
        for stream in (self._stdout, self._stderr):
            if stream:
                stream.close()


@contextlib.contextmanager
def _replaced(name: str, value: Any) -> Iterator[None]:
    """Have torch find `value` under this name while it starts workers: its process handles, its signal handler."""
    before = getattr(multiprocessing_api, name)
    setattr(multiprocessing_api, name, value)
    try:
        yield
    finally:
        setattr(multiprocessing_api, name, before)


@contextlib.contextmanager
def _signals_put_off() -> Iterator[None]:
    """What ends the node may come while torch starts the workers, and would leave some that nobody knows, to be killed
    without the signal: it is taken once all run."""
    name = "_terminate_process_handler"
    original = getattr(multiprocessing_api, name)
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    came: list[int] | None = []

    def handler(number: int, frame: FrameType | None) -> None:
        if came is None:
            original(number, frame)
        else:
            came.append(number)

    with _replaced(name, handler):
        try:
            yield
        finally:
            numbers, came = came, None
            if nohup:  # older torch handles it whatever it was told
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if numbers:
        original(numbers[0], None)
