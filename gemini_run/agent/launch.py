"""From a command line to the end of a run: torchrun's own launcher with our agent in its place."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousGracefulExitError
from torch.distributed.launcher import api as launcher_api
from torch.distributed.launcher.api import LaunchConfig

from gemini_run.agent import etcd_member, etcd_rendezvous, preflight, rendezvous, signals
from gemini_run.agent.argv import CommandLine
from gemini_run.agent.elastic import POLL_INTERVAL, GeminiAgent
from gemini_run.agent.persister import Persister
from gemini_run.agent.process import become_subreaper
from gemini_run.agent.report import Reporter
from gemini_run.agent.runtime import NodeRuntime
from gemini_run.agent.server import AgentServer
from gemini_run.agent.state import AgentState
from gemini_run.agent.zygote import WorkerStarter
from gemini_run.config import Settings
from gemini_run.errors import ConfigError, GeminiError
from gemini_run.ids import new_run_id, shared_run_id
from gemini_run.journal import read_events
from gemini_run.memory.beacons import read_beacons
from gemini_run.memory.segment import NodeMemory
from gemini_run.terminal import say
from gemini_run.wire import RunPaths

DEFAULT_MAX_RESTARTS = 10  #: restarts without progress; torchrun's own default is 0
RUN_FORMAT_VERSION = 1
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  #: that end a node, where torch has no --signals-to-handle
_JOIN_SECONDS = 600.0  #: torch's own join timeout
_MASTER_PORT = 29500  #: torchrun's
_NO_RUN_ID = ("", "none")  # torchrun's "not given"


def torchrun_parser() -> argparse.ArgumentParser:
    """The installed torch's own parser, with gemini-run's name and defaults. Errors are ConfigErrors."""
    parser = torchrun.get_args_parser()
    parser.prog = "gemini-run"
    parser.error = _raise_config_error  # type: ignore[method-assign]
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=DEFAULT_MAX_RESTARTS)
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # as in newer torch: whether a port was given
    return parser


def _raise_config_error(message: str) -> Any:
    raise ConfigError(f"{message} (see gemini-run --help)")


def torchrun_arguments(command: CommandLine) -> argparse.Namespace:
    """torchrun's arguments, with the run id and the rendezvous filled in where the user named none.

    Raises:
        ConfigError: torchrun's options are wrong, or there is no script.
    """
    if command.script is None:
        raise ConfigError("no script given: gemini-run [options] train.py [script options] (see gemini-run --help)")
    args = torchrun_parser().parse_args([*command.torchrun, "script"])
    args.training_script = command.script
    args.training_script_args = list(command.script_args)
    if args.run_path:
        # The same script in a fresh interpreter: what --run-path does without one of its own.
        args.run_path = False
        args.no_python = False
    try:
        _, max_nodes = torchrun.parse_min_max_nnodes(args.nnodes)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"--nnodes {args.nnodes}: give a number or MIN:MAX") from error
    unplaced = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (unplaced and max_nodes == 1):
        # A store of its own on a free port: two jobs on a host never meet.
        args.standalone = False
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.local_addr = args.local_addr or "localhost"
    elif unplaced:
        args.master_port = _MASTER_PORT
    args.named_by = None
    if args.rdzv_id in _NO_RUN_ID:
        if max_nodes > 1:
            meeting = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or _MASTER_PORT}"
            args.rdzv_id = shared_run_id(meeting, [command.script, *command.script_args], os.environ)
            args.named_by = "where the nodes meet and the script's command line, which must be the same on all nodes"
        else:
            args.rdzv_id = new_run_id()
    return args


def launch(command: CommandLine, settings: Settings, subcommands: Collection[str] = ()) -> None:
    """Run a job on this node to its end. Blocks; to be called from the main thread.

    Args:
        subcommands: words that mean something else than a script, for a hint where the script is missing.

    Raises:
        GeminiError: something to be said in one line.
        ChildFailedError: the workers failed for good, as torchrun says it.
        SignalException: this agent was told to stop.
    """
    args = torchrun_arguments(command)
    _, max_nodes = torchrun.parse_min_max_nnodes(args.nnodes)
    settings.replicas_for(max_nodes)
    preflight.check_memory(settings, args.rdzv_id)
    preflight.check_durable(settings)
    preflight.check_port(args)
    preflight.check_script(args, subcommands)
    paths = RunPaths.of(args.rdzv_id)
    first = _make_run(paths, args, command, settings)
    say(f"no --rdzv-id: run {args.rdzv_id}, named after {args.named_by}" if args.named_by else f"run {args.rdzv_id}")
    with _launch_agent_replaced(
        lambda config, entrypoint, words: _run_node(config, entrypoint, words, paths, settings, first)
    ):
        record(torchrun.run)(args)


@contextlib.contextmanager
def _launch_agent_replaced(ours: Callable[[LaunchConfig, str, list[str]], Any]) -> Iterator[None]:
    """Have torch's launcher call `ours` for its agent. Newer torch passes more by keyword: not needed here."""
    before = launcher_api.launch_agent
    launcher_api.launch_agent = lambda config, entrypoint, args, **_: ours(config, entrypoint, args)
    try:
        yield
    finally:
        launcher_api.launch_agent = before


def _run_node(
    config: LaunchConfig, entrypoint: str, words: list[str], paths: RunPaths, settings: Settings, first: bool
) -> dict[int, Any]:
    """This node's part of the run, in the place of torch's ``launch_agent``: its return value and its errors."""
    become_subreaper()
    initialize_metrics(MetricsConfig(config.metrics_cfg))
    try:
        memory = NodeMemory.claim(config.run_id, settings.memory_dir)
    except OSError as error:
        raise ConfigError(f"--memory-dir {settings.memory_dir}: {error.strerror}") from error
    ending = _Ending()
    with contextlib.ExitStack() as stack:
        # What a run that did not succeed left is kept, if it left anything; also what this release cannot read.
        stack.callback(lambda: memory.release(remove=ending.succeeded or all(info.torn for info in memory.scan())))
        # One node alone has no peers: nobody outside this host is to see its port.
        server = AgentServer(memory, config.run_id, host="127.0.0.1" if config.max_nodes == 1 else "")
        stack.callback(server.stop)
        server.start()
        runtime = NodeRuntime(settings, config.run_id, paths, memory, server)
        runtime.event(
            "run_started" if first else "node_started",
            run_id=config.run_id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            nnodes=f"{config.min_nodes}:{config.max_nodes}",
            nproc_per_node=config.nproc_per_node,
        )
        starter = WorkerStarter(
            (entrypoint, *words),
            num_workers=config.nproc_per_node,
            use_zygote=settings.zygote,
            imports=paths.imports,
            on_event=runtime.event,
        )
        stack.callback(starter.close)
        member = None
        if config.rdzv_backend == etcd_member.BACKEND:
            member = etcd_member.EtcdMember(config.rdzv_endpoint, config.run_id, paths.logs)
            stack.callback(member.stop)
            member.start(float(config.rdzv_configs.get("join_timeout", _JOIN_SECONDS)))
        node = _Node(config, entrypoint, words, runtime, starter, member)
        stack.callback(node.signals.close)
        stack.enter_context(node.companions(ending))
        # Not before: connecting to a rendezvous host that is not up blocks outside Python, where no handler runs.
        # The variable is read by torch where it starts the workers.
        named = getattr(config, "signals_to_handle", None)  # newer torch; older knows neither option nor variable
        handled = signals.end_by(named or _SIGNALS, lambda number: SignalException(f"got {number.name}", number))
        if named is not None:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = handled
        return node.run(ending)


@dataclasses.dataclass
class _Ending:
    """How this node's part ended. What is kept and who is told depends on it.

    Attributes:
        succeeded: all workers of all nodes did.
        final: the run is over for all nodes (success, or failure for good): its rendezvous is closed.
    """

    succeeded: bool = False
    final: bool = False


class _Node:
    """One node's agent and what runs beside it."""

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: str,
        words: list[str],
        runtime: NodeRuntime,
        starter: WorkerStarter,
        member: etcd_member.EtcdMember | None,
    ) -> None:
        self.signals = signals.Forwarder(runtime.event, lambda: _stepped(runtime.memory))
        self._runtime = runtime
        self._entrypoint_name = launcher_api._get_entrypoint_name(entrypoint, words)
        self._state = AgentState(restarts_left=config.max_restarts)
        parameters = RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
        master_addr, master_port = launcher_api._get_addr_and_port(parameters)
        if member is not None:
            inner = etcd_rendezvous.handler_over(member.client, etcd_member.BACKEND, parameters)
        else:
            etcd_rendezvous.register()
            inner = rendezvous_registry.get_rendezvous_handler(parameters)
        self._rendezvous = rendezvous.wrap(inner, runtime, config.nproc_per_node, config.role)
        self._rendezvous.on_spare = self._on_spare
        self._persister = Persister(runtime, self._rendezvous)
        self._reporter = Reporter(runtime, self._rendezvous, self._state, self._persister)
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=entrypoint,
            args=tuple(words),
            rdzv_handler=self._rendezvous,
            max_restarts=config.max_restarts,
            monitor_interval=POLL_INTERVAL,
            master_addr=master_addr,
            master_port=master_port,
            local_addr=config.local_addr,
            **_passed_on(config),
        )
        self._agent = GeminiAgent(
            spec=spec,
            logs_specs=config.logs_specs or DefaultLogsSpecs(),
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=getattr(config, "shutdown_timeout", None),
            runtime=runtime,
            rendezvous=self._rendezvous,
            starter=starter,
            state=self._state,
            signals=self.signals,
            on_round=self._on_round,
            on_start=self._reporter.poke,
        )

    def _on_round(self) -> None:
        self._persister.on_round()
        self._reporter.poke()

    def _on_spare(self, spare: bool) -> None:
        self._state.phase = "spare" if spare else "rendezvous"
        self._state.workers = {}
        self._reporter.poke()

    @contextlib.contextmanager
    def companions(self, ending: _Ending) -> Iterator[None]:
        """The persister and the reporter, running; ended in the order in which they need each other."""
        self._reporter.start()
        try:
            yield
        finally:
            try:
                self._persister.finish(ending.succeeded)
            finally:
                self._reporter.stop()

    def run(self, ending: _Ending) -> dict[int, Any]:
        """Raises: ChildFailedError, SignalException, GeminiError."""
        try:
            result = self._agent.run()
            if result is None:  # a spare whose run ended without it (torch handles this exit itself)
                ending.succeeded = self._others_succeeded()
                self._end("succeeded")
                return {}
            if result.is_failed():
                ending.final = True
                if self._agent.fatal is not None:
                    raise self._agent.fatal
                raise ChildFailedError(name=self._entrypoint_name, failures=result.failures)
            ending.succeeded = ending.final = True
            self._end("succeeded")
            self._runtime.event("run_succeeded")
            return dict(result.return_values)
        except ChildFailedError as error:
            self._end("failed")
            _, first = error.get_first_failure()
            self._runtime.event("run_failed", cause=self._state.last_failure or first.message)
            raise
        except SignalException as error:
            self._end("stopped")
            self._runtime.event("node_stopped", signal=error.sigval.name)
            raise
        except GeminiError as error:
            # All nodes plan alike: what one cannot do, none can.
            ending.final = True
            self._end("failed")
            self._runtime.event("run_failed", cause=str(error))
            raise
        except RendezvousGracefulExitError:
            self._end("succeeded")
            return {}
        except RendezvousClosedError as error:
            self._end("failed")
            raise GeminiError("another node ended the run; its log says why") from error
        finally:
            if ending.final:
                self._runtime.server.finished = True  # peers that watch this node take its end as orderly
                self._rendezvous.shutdown()

    def _others_succeeded(self) -> bool:
        """Whether the log says so, where their run home is this node's: what a spare kept from a time as a member is
        of no use then."""
        me = self._runtime.memory.node_id
        for event in reversed(read_events(self._runtime.paths.events)):
            if event["event"] in ("run_succeeded", "run_failed"):
                return bool(event["event"] == "run_succeeded")
            if event["event"] == "spare_waiting" and event["node"] == me:
                return False  # whatever ended before was an earlier start of the run
        return False

    def _end(self, phase: str) -> None:
        self._state.phase = phase


def _passed_on(config: LaunchConfig) -> dict[str, Any]:
    """What torch's launcher hands from its configuration to the workers' spec unchanged, where this torch has it."""
    fields = {field.name for field in dataclasses.fields(WorkerSpec)}
    names = (
        "event_log_handler",
        "numa_options",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "virtual_local_rank",
    )
    return {name: getattr(config, name) for name in names if name in fields and hasattr(config, name)}


def _stepped(memory: NodeMemory) -> set[int]:
    return {beacon.pid for beacon in read_beacons(memory.paths).values() if beacon.first_step_at}


def _make_run(paths: RunPaths, args: argparse.Namespace, command: CommandLine, settings: Settings) -> bool:
    """Make the run's directory and, as the first agent of the run, its run.json.

    Returns: whether this agent was the first.

    Raises:
        ConfigError: the run home cannot be written.
    """
    facts = {
        "version": RUN_FORMAT_VERSION,
        "run_id": args.rdzv_id,
        "argv": sys.argv,
        "script": command.script,
        "settings": dataclasses.asdict(settings),
        "host": socket.gethostname(),
        "started_at": time.time(),
        "pid": os.getpid(),
        "nnodes": args.nnodes,
        "nproc_per_node": args.nproc_per_node,
    }
    mine = paths.root / f".run.json.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        for folder in (paths.root, paths.logs, paths.nodes):
            folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(json.dumps(facts, indent=1, default=str) + "\n", encoding="utf-8")
        try:
            os.link(mine, paths.run_json)  # whole, and only where there is none
            return True
        except FileExistsError:
            return False  # another agent of this run, or an earlier start of it
        finally:
            mine.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run's directory {paths.root} cannot be written ({error.strerror}); set GEMINI_RUN_HOME to one "
            "that can"
        ) from error
