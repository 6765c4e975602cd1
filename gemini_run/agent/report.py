"""The node's status file: what `gemini-run status` reads, written by a thread of the agent about once a second."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, Protocol

from gemini_run.agent.runtime import NodeRuntime, RoundInfo
from gemini_run.agent.state import AgentState
from gemini_run.journal import write_json_atomic
from gemini_run.memory.beacons import read_beacons
from gemini_run.terminal import say

REPORT_VERSION = 1
REPORT_SECONDS = 1.0  #: between two reports where nobody pokes


class HasRound(Protocol):
    """What the reporter needs of the rendezvous."""

    @property
    def round(self) -> RoundInfo | None: ...


class HasDurable(Protocol):
    """What the reporter needs of the persister."""

    @property
    def durable(self) -> int | None: ...

    @property
    def failures(self) -> int: ...


class Reporter:
    """Replaces ``RunPaths.node_json`` of this node about once a second, and at once when poked.

    It never ends the job: a run home that cannot be written is said once, and tried again each time.
    """

    def __init__(
        self, runtime: NodeRuntime, rendezvous: HasRound, state: AgentState, persister: HasDurable | None = None
    ) -> None:
        self._runtime = runtime
        self._rendezvous = rendezvous
        self._state = state
        self._persister = persister
        self._wake = threading.Event()
        self._stopping = False
        self._said = False
        self._rounds: dict[int, int] = {}  # round number -> iterations it had to repeat
        self._failure: dict[str, Any] | None = None
        self._started_at = time.time()
        self._thread = threading.Thread(target=self._main, name="gemini-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Something changed that a user may be waiting to see: report now. Returns at once; any thread."""
        self._wake.set()

    def stop(self) -> None:
        """Write a last report and end the thread. Idempotent. The node's memory must still be there."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write()

    def snapshot(self) -> dict[str, Any]:
        """The report as it would be written now (JSON values). Raises: OSError if the memory cannot be read."""
        runtime, state = self._runtime, self._state
        present = self._rendezvous.round if state.phase != "spare" else None
        memory = runtime.memory
        infos = memory.scan()
        slots = [info for info in infos if info.usable and info.header]
        return {
            "version": REPORT_VERSION,
            "node": memory.node_id,
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": self._started_at,
            "updated_at": time.time(),
            "state": "recovering" if state.phase == "rendezvous" and present is not None else state.phase,
            "round": present.number if present else None if state.phase == "spare" else state.round,
            "node_rank": present.node_rank if present else None,
            "num_nodes": present.num_nodes if present else None,
            "local_world_sizes": [node.local_world_size for node in present.nodes] if present else None,
            "address": _address(present),
            "memory_dir": str(memory.paths.root),
            "local_world_size": present.nodes[present.node_rank].local_world_size if present else None,
            "replicas": _replicas(runtime, present),
            "failure_domain": runtime.settings.failure_domain,
            "workers": self._workers(),
            "slots": [
                {
                    "owner": info.header.owner,
                    "iteration": info.header.iteration,
                    "round": info.header.round,
                    "world_size": info.header.world_size,
                    "bytes": info.header.end,
                    "complete": info.header.complete,
                    "sealed": bool(info.header.sealed),
                    "hold": info.header.hold,
                }
                for info in slots
                if info.header
            ],
            "history": memory.notes().get("history", []),
            "memory_bytes": sum(_size(info.path) for info in infos),
            "last_failure": self._last_failure(),
            "iterations_lost": self._lost(present),
            "restarts": sum(1 for number in self._rounds if number > 0),
            "restarts_left": state.restarts_left,
            "restore_source": present.restore_source if present else None,
            "durable": self._durable(),
        }

    def _workers(self) -> list[dict[str, Any]]:
        beacons = read_beacons(self._runtime.memory.paths)
        rows = []
        for local_rank, (rank, pid) in sorted(self._state.workers.items()):
            row: dict[str, Any] = {"local_rank": local_rank, "rank": rank, "pid": pid, "phase": "starting"}
            beacon = beacons.get(local_rank)
            if beacon is not None and beacon.pid == pid:  # else what a worker of an earlier round said
                row |= {
                    "phase": beacon.phase,
                    "iteration": beacon.iteration,
                    "snapshot": beacon.snapshot,
                    "committed": beacon.committed,
                    "stall_ms": round(1e3 * beacon.stall, 3),
                    "state_bytes": beacon.state_bytes,
                    "interval": beacon.interval or None,
                }
            rows.append(row)
        return rows

    def _last_failure(self) -> dict[str, Any] | None:
        text = self._state.last_failure
        if text is not None and (self._failure is None or self._failure["cause"] != text):
            self._failure = {"t": time.time(), "cause": text}
        return self._failure

    def _lost(self, present: RoundInfo | None) -> int:
        if present is not None:
            self._rounds[present.number] = present.lost_iterations
        return sum(self._rounds.values())

    def _durable(self) -> dict[str, Any] | None:
        location = self._runtime.settings.durable
        if location is None:
            return None
        persister = self._persister
        return {
            "location": location,
            "newest": persister.durable if persister else None,
            "failures": persister.failures if persister else 0,
        }

    def _main(self) -> None:
        while not self._stopping:
            self._write()
            self._wake.wait(REPORT_SECONDS)
            self._wake.clear()

    def _write(self) -> None:
        path = self._runtime.paths.node_json(self._runtime.memory.node_id)
        try:
            write_json_atomic(path, self.snapshot())
        except OSError as error:
            if not self._said:
                self._said = True
                say(f"the node's status cannot be written to {path}: {error.strerror}; training goes on without it")
        except Exception as error:  # noqa: BLE001 - the thread's top: a report is not worth a job
            if not self._said:
                self._said = True
                say(f"the node's status cannot be told: {error!r} (a fault of gemini-run); training goes on")


def _address(present: RoundInfo | None) -> str | None:
    if present is None:
        return None
    node = present.nodes[present.node_rank]
    return f"{node.host}:{node.port}"


def _replicas(runtime: NodeRuntime, present: RoundInfo | None) -> int | None:
    return runtime.settings.copies_among(present.num_nodes) if present else None


def _size(path: Any) -> int:
    try:
        return int(path.stat().st_blocks) * 512
    except FileNotFoundError:  # replaced or freed since it was listed
        return 0
