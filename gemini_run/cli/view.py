"""What this machine knows of a run: its directory, its nodes' reports, and the memory itself. Only reads."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from pathlib import Path
from typing import Any

from gemini_run.agent.process import is_running
from gemini_run.errors import UnknownRun
from gemini_run.journal import read_events
from gemini_run.memory.beacons import BeaconState, read_beacons
from gemini_run.memory.segment import SlotInfo, agent_alive, node_directories, scan_slots
from gemini_run.plan.recovery import NodeFacts, SlotFact, as_history
from gemini_run.wire import DEFAULT_MEMORY_BASE, MemoryPaths, RunPaths, run_home

Json = dict[str, Any]

SILENT_SECONDS = 15.0  #: a node elsewhere that reported nothing for so long counts as dead
EVENT_BYTES = 1 << 20  #: of the log's end: enough for the last failure, and quick for a log of any length
ENDED = ("succeeded", "failed", "stopped")  #: last words of an agent


@dataclasses.dataclass(frozen=True)
class NodeView:
    """One node.

    Attributes:
        node_id: as its memory is named.
        report: its last status file, empty where there is none.
        memory: its memory directory if it is on this machine.
        alive: its agent runs, as far as can be told from here.
        slots: its slot files as they are now, where `memory` is given.
        beacons: its workers' as they are now, where `memory` is given.
        notes: node rank, round and history as kept in its memory.
    """

    node_id: str
    report: Json
    memory: MemoryPaths | None
    alive: bool
    slots: tuple[SlotInfo, ...] = ()
    beacons: dict[int, BeaconState] = dataclasses.field(default_factory=dict)
    notes: Json = dataclasses.field(default_factory=dict)

    @property
    def round(self) -> int | None:
        value = self.report.get("round")
        return self.notes.get("round") if value is None and not self.spare else value

    @property
    def node_rank(self) -> int | None:
        value = self.report.get("node_rank")
        return self.notes.get("node_rank") if value is None and not self.spare else value

    @property
    def spare(self) -> bool:
        """Waits for a place in the job."""
        return self.alive and self.report.get("state") == "spare"

    @property
    def state(self) -> str:
        """The agent's last word, or ``dead`` if it had none."""
        said = str(self.report.get("state", "starting" if self.alive else "dead"))
        return said if self.alive or said in ENDED else "dead"

    def slot_facts(self) -> tuple[SlotFact, ...]:
        """Complete slots: from the memory itself where it is here, else as a living agent last reported them."""
        if self.memory is not None:
            return tuple(
                SlotFact(h.owner, h.iteration, h.round, h.world_size, bool(h.sealed), h.end)
                for info in self.slots
                if info.usable and (h := info.header)
            )
        if not self.alive:
            return ()
        return tuple(
            SlotFact(s["owner"], s["iteration"], s["round"], s["world_size"], s["sealed"], s["bytes"])
            for s in self.report.get("slots", ())
        )

    def facts(self, node_rank: int, local_world_size: int) -> NodeFacts:
        """What this node would bring to a recovery plan."""
        history = as_history(self.notes.get("history") or self.report.get("history") or ())
        return NodeFacts(self.node_id, node_rank, local_world_size, self.slot_facts(), history)


@dataclasses.dataclass(frozen=True)
class RunView:
    """One run.

    Attributes:
        facts: run.json, empty where only memory is left of the run.
        nodes: of the newest round, in node-rank order; nodes that have no round yet, and spares, come last.
        former: nodes that are no longer part of it.
        events: the end of the log.
    """

    run_id: str
    paths: RunPaths
    facts: Json
    nodes: tuple[NodeView, ...]
    former: tuple[NodeView, ...]
    events: tuple[Json, ...]

    @property
    def settings(self) -> Json:
        settings = self.facts.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def started_at(self) -> float:
        return float(self.facts.get("started_at") or 0.0)

    @property
    def durable(self) -> str | None:
        """Location of the durable tier, None = the run has none."""
        location = self.settings.get("durable")
        return str(location) if location else None

    def local_world_sizes(self) -> list[int]:
        """Workers of each node of the newest round, by node rank; empty before the first round."""
        for node in self.nodes:
            if sizes := node.report.get("local_world_sizes"):
                return [int(size) for size in sizes]
        return []

    def node_facts(self) -> list[NodeFacts]:
        """The nodes of the newest round as a recovery plan sees them; one that is gone brings nothing."""
        by_rank = {node.node_rank: node for node in self.nodes}
        found = []
        for rank, size in enumerate(self.local_world_sizes()):
            node = by_rank.get(rank)
            found.append(node.facts(rank, size) if node else NodeFacts(f"node {rank}", rank, size))
        return found


def known_runs() -> list[str]:
    """Run ids with a directory in the run home, newest first."""
    found = []
    try:
        folders = list((run_home() / "runs").iterdir())
    except FileNotFoundError:
        return []
    for folder in folders:
        facts = _read_json(folder / "run.json")
        if isinstance(facts.get("run_id"), str):
            found.append((float(facts.get("started_at") or 0.0), str(facts["run_id"])))
    return [run_id for _, run_id in sorted(found, reverse=True)]


def load_run(run_id: str) -> RunView:
    """Everything that is known here of a run.

    Raises:
        UnknownRun: neither a directory in the run home nor memory on this machine; names the known runs.
    """
    paths = RunPaths.of(run_id)
    facts = _read_json(paths.run_json)
    settings = facts.get("settings")
    base = Path((settings or {}).get("memory_dir") or DEFAULT_MEMORY_BASE)
    memories = {paths.root.name: paths for paths in node_directories(run_id, base)}
    if not facts and not memories:
        known = known_runs()
        what = f"known here: {_few(known)}" if known else "no run is known on this machine"
        raise UnknownRun(f"unknown run {run_id!r}; {what} (run home: {run_home()})")
    reports = _read_reports(paths)
    for node_id, report in reports.items():
        # Agents of one host may have been given memory in different places.
        told = Path(str(report.get("memory_dir") or ""))
        here = report.get("hostname") == socket.gethostname() and told.name == node_id
        if here and node_id not in memories and (told / "slots").is_dir():
            memories[node_id] = MemoryPaths(told)
    nodes = [_node(node_id, reports.get(node_id, {}), memories.get(node_id), paths)
             for node_id in sorted(reports.keys() | memories.keys())]  # fmt: skip
    present, former = _present(nodes)
    events = tuple(read_events(paths.events, last_bytes=EVENT_BYTES))
    return RunView(run_id, paths, facts, tuple(present), tuple(former), events)


def memory_view(directory: Path) -> NodeView | None:
    """The node whose memory `directory` is, or None if it is no such directory."""
    if not (directory / "node.json").is_file() or not (directory / "slots").is_dir():
        return None
    return _node(directory.name, {}, MemoryPaths(directory))


def _node(node_id: str, report: Json, memory: MemoryPaths | None, paths: RunPaths | None = None) -> NodeView:
    if memory is None:
        assert paths is not None, "it is known by its report alone"
        return NodeView(node_id, report, None, _reports_still(report, paths.node_json(node_id)))
    notes = _read_json(memory.node_json).get("notes")
    return NodeView(
        node_id, report, memory, agent_alive(memory), tuple(scan_slots(memory)), read_beacons(memory),
        notes if isinstance(notes, dict) else {},
    )  # fmt: skip


def _reports_still(report: Json, file: Path) -> bool:
    """Whether the agent of a node whose memory cannot be seen from here lives, judged by its reports.

    Their age is the file's: the file system has one clock for all nodes, which may differ among themselves.
    """
    if not report or report.get("state") in ENDED:
        return False
    try:
        fresh = time.time() - file.stat().st_mtime < SILENT_SECONDS
    except FileNotFoundError:
        return False
    here = report.get("hostname") == socket.gethostname()
    return fresh and (not here or (isinstance(pid := report.get("pid"), int) and is_running(pid)))


def _present(nodes: list[NodeView]) -> tuple[list[NodeView], list[NodeView]]:
    """(nodes of the newest round and those that wait for their first, all others)."""
    newest = max((node.round for node in nodes if node.round is not None), default=None)
    present: list[NodeView] = []
    former: list[NodeView] = []
    for node in nodes:
        joining = node.round is None and node.alive
        (present if joining or node.round == newest else former).append(node)
    # Of two that claim one rank (a node was replaced within a round) the one that lives has it.
    ranked: dict[int, NodeView] = {}
    others = []
    for node in sorted(present, key=lambda n: (not n.alive, -float(n.report.get("updated_at") or 0.0))):
        if node.node_rank is None:
            others.append(node)
        elif node.node_rank in ranked:
            former.append(node)
        else:
            ranked[node.node_rank] = node
    return [ranked[rank] for rank in sorted(ranked)] + others, former


def _read_reports(paths: RunPaths) -> dict[str, Json]:
    found = {}
    try:
        files = sorted(paths.nodes.glob("[!.]*.json"))
    except OSError:
        return {}
    for file in files:
        report = _read_json(file)
        if report.get("version") == 1 and isinstance(report.get("node"), str):
            found[str(report["node"])] = report
    return found


def _read_json(path: Path) -> Json:
    """A JSON object, empty where the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _few(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
