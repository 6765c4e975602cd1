"""Nodes on one machine: agents that can be started, killed, frozen and cut off, and a cluster that cleans up.

What a test, the demo, a bench or a drill needs to have real failures::

    with LocalCluster(nodes=2, kind="shm") as cluster:
        cluster.start("examples/char_lm.py", "--steps", "200")
        wait_for(lambda: cluster.iteration() >= 20, 60, "20 iterations", context=cluster.tail)
        cluster.nodes[1].kill()             # agent, workers and /dev/shm at once
        cluster.start_node(1)               # the replacement, with the same command line
        assert cluster.wait(120) == [0, 0]

Only real processes, signals and namespaces: nothing of gemini-run is replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from gemini_run.ids import RunId, new_run_id
from gemini_run.journal import read_events
from gemini_run.testing.namespaces import Network, SharedMemory, require_root_namespaces
from gemini_run.testing.node import Node, gemini_run_program
from gemini_run.testing.processes import WaitTimeout, free_port, wait_for
from gemini_run.wire import DEFAULT_MEMORY_BASE, ENV_RUN_HOME, MemoryPaths, RunPaths

__all__ = [
    "LocalCluster",
    "Node",
    "WaitTimeout",
    "free_port",
    "gemini_run_program",
    "read_events",
    "require_root_namespaces",
    "wait_for",
]

#: process: plain processes; shm: own mount namespace with an own /dev/shm; net: own network as well
NodeKind = Literal["process", "shm", "net"]

DEFAULT_SHM_BYTES = 512 * 2**20


class LocalCluster:
    """Nodes of one run on this machine. A context manager: nothing it started or made outlives it.

    Attributes:
        run_id: unique; given to the agents as ``--rdzv-id``.
        home: a temporary GEMINI_RUN_HOME, removed at the end.
        scratch: a temporary directory for the caller's files, removed at the end.
        nodes: by index.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        kind: NodeKind = "process",
        workers_per_node: int = 1,
        shm_bytes: int = DEFAULT_SHM_BYTES,
        rate: str | None = None,
        environment: Mapping[str, str] | None = None,
        echo: bool = True,
    ) -> None:
        """
        Args:
            kind: what separates the nodes. "shm" and "net" need root: ask `require_root_namespaces` first.
            shm_bytes: size of each node's own /dev/shm.
            rate: of each node's link, as `tc` writes it; kind "net" only.
            environment: added to what every node inherits.
            echo: print the end of every node's output if the body raises.
        """
        if rate and kind != "net":
            raise ValueError('rate needs kind="net"')
        self.run_id = RunId(f"local-{new_run_id()}")
        self.nodes: list[Node] = []
        self._num_nodes = nodes
        self._kind = kind
        self._workers = workers_per_node
        self._shm_bytes = shm_bytes
        self._rate = rate
        self._extra = dict(environment or {})
        self._echo = echo
        self._network: Network | None = None
        self._command: list[str] = []

    def __enter__(self) -> LocalCluster:
        self._root = Path(tempfile.mkdtemp(prefix="gemini-run-local-"))
        self.home, self.scratch = self._root / "home", self._root / "scratch"
        self.scratch.mkdir()
        self._plain = DEFAULT_MEMORY_BASE / f"gemini-run-testing-{self.run_id}"
        try:
            self._network = Network(self._rate) if self._kind == "net" else None
            for index in range(self._num_nodes):
                self.nodes.append(self._make_node(index))
        except BaseException:
            self._close()
            raise
        self.port = free_port()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._echo and not isinstance(error, KeyboardInterrupt):
            print(self.tail(), file=sys.stderr, flush=True)
        self._close()

    @property
    def paths(self) -> RunPaths:
        """The files of this run's directory."""
        return RunPaths.of(self.run_id, self.home)

    def environment(self) -> dict[str, str]:
        """What ``gemini-run status`` and ``recover`` need to find this run."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GEMINI_", "TORCHELASTIC_"))}
        return {
            "OMP_NUM_THREADS": "1",
            **inherited,
            "PYTHONUNBUFFERED": "1",
            ENV_RUN_HOME: str(self.home),
            **self._extra,
        }

    def options(self, index: int) -> list[str]:
        """The torchrun options that make node `index` part of this run."""
        node = self.nodes[index]
        return [
            f"--nnodes={self._num_nodes}",
            f"--nproc-per-node={self._workers}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.nodes[0].address}:{self.port}",
            f"--rdzv-id={self.run_id}",
            # All nodes share one address on loopback: say who holds the store instead of letting them guess.
            f"--rdzv-conf=is_host={int(index == 0)}",
            f"--local-addr={node.address}",
        ]

    def start(self, script: str | Path, *arguments: str, options: Sequence[str] = ()) -> None:
        """Start every node on ``gemini-run <options of the run> <options> script arguments``."""
        self._command = [*options, str(script), *arguments]
        for index in range(self._num_nodes):
            self.start_node(index)

    def start_node(self, index: int) -> None:
        """Start one node (again), with the command line of `start`."""
        if not self._command:
            raise RuntimeError("call start() first: it says what the nodes run")
        self.nodes[index].start([*self.options(index), *self._command])

    def kill_worker(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the worker of a global rank and return its process id.

        Raises:
            RuntimeError: no living worker has that rank now.
        """
        node_rank, local_rank = divmod(rank, self._workers)
        return self.node_of_rank(node_rank).kill_worker(local_rank, number)

    def node_of_rank(self, node_rank: int) -> Node:
        """The node that holds `node_rank` in the present round (ranks go by arrival, not by index)."""
        for node in self.nodes:
            paths = node.memory()
            if paths and _notes(paths).get("node_rank") == node_rank:
                return node
        raise RuntimeError(f"no node says that it has node rank {node_rank}")

    def iteration(self) -> int:
        """Iterations that every worker has finished, by the beacons; 0 before all have said something."""
        said = [beacon for node in self.nodes for beacon in node.beacons().values()]
        whole = len(said) == self._num_nodes * self._workers
        return min((beacon.iteration for beacon in said), default=0) if whole else 0

    def events(self, *names: str) -> list[dict[str, Any]]:
        """The run's events so far, all or those of these names."""
        return [e for e in read_events(self.paths.events) if not names or e["event"] in names]

    def wait_for(self, predicate: Callable[[], Any], timeout: float, what: str) -> Any:
        """As the function `wait_for`; a timeout shows the nodes' output."""
        return wait_for(predicate, timeout, what, context=self.tail)

    def wait(self, timeout: float) -> list[int]:
        """Exit codes of all nodes, by index. Raises: WaitTimeout."""
        return [node.wait(timeout) for node in self.nodes]

    def tail(self) -> str:
        """The end of every node's output."""
        return "\n".join(node.tail() for node in self.nodes)

    def _make_node(self, index: int) -> Node:
        if self._network:
            self._network.join(index)
        memory = None
        if self._kind != "process":
            memory = SharedMemory(self._root / f"shm{index}", self._shm_bytes)
        return Node(
            index,
            run_id=self.run_id,
            scratch=self.scratch,
            environment=self.environment(),
            memory=memory,
            network=self._network,
            plain_memory=self._plain / f"node{index}",
        )

    def _close(self) -> None:
        for node in self.nodes:
            node.close()
        if self._network:
            self._network.close()
        shutil.rmtree(self._plain, ignore_errors=True)
        shutil.rmtree(self._root)


def _notes(paths: MemoryPaths) -> dict[str, Any]:
    try:
        notes: dict[str, Any] = json.loads(paths.node_json.read_text())["notes"]
    except (FileNotFoundError, ValueError, KeyError):
        return {}  # being made, or gone
    return notes
