"""One node on this machine: an agent and all that descends from it, and the failures it can have."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemini_run.config import env_name
from gemini_run.ids import RunId
from gemini_run.memory.beacons import BeaconState, read_beacons
from gemini_run.memory.segment import node_directories
from gemini_run.testing.namespaces import INTERFACE, Network, SharedMemory
from gemini_run.testing.processes import (
    MARKER,
    WaitTimeout,
    kill_all,
    marked_processes,
    signal_all,
    stop_all,
)
from gemini_run.wire import MemoryPaths

_TAIL_LINES = 40


def gemini_run_program() -> list[str]:
    """The command that starts gemini-run of this interpreter's installation."""
    beside = Path(sys.executable).with_name("gemini-run")
    found = str(beside) if beside.exists() else shutil.which("gemini-run")
    if found is None:
        raise FileNotFoundError("gemini-run is not installed beside this Python: pip install -e .")
    return [found]


class Node:
    """One node: an agent and all that descends from it. Made by LocalCluster.

    Attributes:
        index: place in the cluster, 0 is where the rendezvous store lives.
        address: under which other nodes reach it.
        memory_base: the directory that is its host memory, as seen from here.
    """

    def __init__(
        self,
        index: int,
        *,
        run_id: RunId,
        scratch: Path,
        environment: Mapping[str, str],
        memory: SharedMemory | None,
        network: Network | None,
        plain_memory: Path,
    ) -> None:
        self.index = index
        self.address = network.address(index) if network else "127.0.0.1"
        self.memory_base = memory.directory if memory else plain_memory
        self._run_id = run_id
        self._scratch = scratch
        self._memory = memory
        self._network = network
        self._marker = f"{run_id}-{index}-{secrets.token_hex(4)}"
        self._environment = {**environment, MARKER: self._marker}
        if memory is None:
            plain_memory.mkdir(parents=True, exist_ok=True)
            self._environment[env_name("memory_dir")] = str(plain_memory)
        if network is not None:  # the machine's own name is no address in there, and gloo would ask for it
            self._environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(
        self,
        arguments: Sequence[str],
        *,
        program: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start ``gemini-run <arguments>`` (or another `program`) as this node's agent.

        Raises:
            RuntimeError: it runs already.
        """
        if self.running:
            raise RuntimeError(f"node {self.index} runs already (process {self.pid})")
        command = [*(gemini_run_program() if program is None else program), *arguments]
        if self._memory:
            command = self._memory.command(command)
        if self._network:
            command = self._network.command(self.index, command)
        self._starts += 1
        with self.output_path.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environment, **(environment or {})},
                start_new_session=True,
            )

    @property
    def output_path(self) -> Path:
        """Standard output and error of the newest start."""
        return self._scratch / f"node{self.index}.{self._starts}.out"

    @property
    def pid(self) -> int:
        """Of the agent. Raises: RuntimeError if it was never started."""
        if self._process is None:
            raise RuntimeError(f"node {self.index} was never started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[int]:
        """Every living process of this node."""
        return marked_processes(self._marker)

    def memory(self) -> MemoryPaths | None:
        """Where its slots and beacons lie; None before the agent has made them."""
        directories = node_directories(self._run_id, self.memory_base)
        return directories[0] if directories else None

    def beacons(self) -> dict[int, BeaconState]:
        """Local rank -> what that worker last said. The pid in it may belong to an ended round."""
        paths = self.memory()
        return read_beacons(paths) if paths else {}

    def worker_pid(self, local_rank: int = 0) -> int | None:
        """The process of a worker, None while it has said nothing or is dead."""
        beacon = self.beacons().get(local_rank)
        return beacon.pid if beacon and beacon.pid in self.processes() else None

    # --- failures -----------------------------------------------------------------------------------

    def kill(self, *, keep_memory: bool = False) -> None:
        """Node loss: agent and all descendants end at once, and the host memory with them.

        Args:
            keep_memory: only the processes die (say, the agent was killed by hand).
        """
        kill_all(self._marker)
        if self._process is not None:
            self._process.wait()
        if keep_memory:
            return
        if self._memory:
            self._memory.lose()
        else:
            shutil.rmtree(self.memory_base)
            self.memory_base.mkdir()

    def kill_agent(self) -> None:
        """SIGKILL the agent alone."""
        os.kill(self.pid, signal.SIGKILL)

    def kill_worker(self, local_rank: int = 0, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to one worker and return its process id.

        Raises:
            RuntimeError: there is no such worker now.
        """
        pid = self.worker_pid(local_rank)
        if pid is None:
            raise RuntimeError(f"node {self.index} has no living worker of local rank {local_rank}")
        os.kill(pid, number)
        return pid

    def freeze(self) -> None:
        """SIGSTOP all of the node: it keeps its memory and sockets and answers nothing."""
        stop_all(self._marker)

    def thaw(self) -> None:
        """End `freeze`."""
        signal_all(self.processes(), signal.SIGCONT)

    def cut_link(self) -> None:
        """Drop every packet from and to this node. Kind "net" only."""
        self._require_network().cut(self.index)

    def restore_link(self) -> None:
        """End `cut_link`."""
        self._require_network().restore(self.index)

    def _require_network(self) -> Network:
        if self._network is None:
            raise RuntimeError('only nodes of kind "net" have a link of their own')
        return self._network

    # --- results ------------------------------------------------------------------------------------

    def wait(self, timeout: float) -> int:
        """The agent's exit code. Raises: WaitTimeout, with the end of the output."""
        if self._process is None:
            raise RuntimeError(f"node {self.index} was never started")
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise WaitTimeout(f"node {self.index} still ran after {timeout:g} s\n{self.tail()}") from None

    def output(self) -> str:
        """All that the newest start has printed so far."""
        return self.output_path.read_text(errors="replace") if self.output_path.exists() else ""

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The end of `output`, under a heading."""
        if self._process is None:
            state = "never started"
        else:
            code = self._process.poll()
            state = "runs" if code is None else f"exit code {code}"
        return "\n".join([f"--- node {self.index} ({state})", *self.output().splitlines()[-lines:]])

    def close(self) -> None:
        """End every process and remove the host memory. Idempotent."""
        kill_all(self._marker)
        if self._process is not None:
            self._process.wait()
        if self._memory:
            self._memory.close()
        else:
            shutil.rmtree(self.memory_base, ignore_errors=True)
