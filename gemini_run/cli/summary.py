"""A run as one JSON document: what ``gemini-run status --json`` prints and the table is made of."""

from __future__ import annotations

import time
from typing import Any

from gemini_run.cli.view import Json, NodeView, RunView
from gemini_run.plan.inventory import MemoryHealth, memory_health

STATUS_VERSION = 1
FAILURES = ("worker_failed", "node_lost", "hang_detected", "fell_back", "run_failed", "worker_error")


def summarise(run: RunView) -> Json:
    """The document. Its keys are documented in the command's help and stay as they are."""
    wanted = next((n.report["replicas"] for n in run.nodes if n.report.get("replicas")), None)
    health = memory_health(run.node_facts(), wanted or 1)
    iteration = _iteration(run)
    reports = [node.report for node in (*run.nodes, *run.former) if node.report]
    return {
        "run_id": run.run_id,
        "state": run_state(run),
        "started_at": run.facts.get("started_at"),
        "script": run.facts.get("script"),
        "argv": run.facts.get("argv"),
        "directory": str(run.paths.root),
        "round": max((node.round for node in run.nodes if node.round is not None), default=None),
        "iteration": iteration,
        "lag": None if iteration is None or health.at is None else max(0, iteration - health.at),
        "snapshots": _snapshots(run),
        "world_size": sum(run.local_world_sizes()) or None,
        "nodes": [_node(node) for node in run.nodes],
        "former_nodes": [_node(node) for node in run.former],
        "tiers": {
            "local_memory": {"iteration": health.local},
            "peer_memory": {"iteration": health.peer},
            "durable": _durable(run, reports),
        },
        "replicas": _replicas(run, health, wanted),
        "last_failure": _last_failure(run, reports),
        "iterations_lost": max((report.get("iterations_lost") or 0 for report in reports), default=0),
        "restarts": max((report.get("restarts") or 0 for report in reports), default=0),
        "no_room": _no_room(run),
        "memory_bytes": sum(_memory_bytes(node) or 0 for node in run.nodes),
        "slot_problems": [
            {"node": node.node_id, "file": str(info.path), "problem": info.problem}
            for node in (*run.nodes, *run.former)
            for info in node.slots
            if info.problem
        ],
    }


def brief(run: RunView) -> Json:
    """One run in the list of runs."""
    return {
        "run_id": run.run_id,
        "state": run_state(run),
        "iteration": _iteration(run),
        "started_at": run.facts.get("started_at"),
        "script": run.facts.get("script"),
    }


def run_state(run: RunView) -> str:
    """``starting``, ``running``, ``recovering``, ``finished``, ``failed``, ``stopped`` (by a signal) or ``dead``:
    the agents are gone and none said why."""
    said = [node.state for node in run.nodes]
    alive = [node for node in run.nodes if node.alive]
    if not alive:
        return _ending(run, said)
    # One that vanished is being replaced, or its agent is about to be declared lost.
    if any(state in ("recovering", "dead") for state in said):
        return "recovering"
    if any(state in ("running", "finished") for state in said):
        return "running"
    return "starting"


def _ending(run: RunView, said: list[str]) -> str:
    if said and all(state == "succeeded" for state in said):
        return "finished"
    for state in ("failed", "stopped"):
        if state in said:
            return state
    # A node that was killed right after the end; a later start of the run would have written later reports.
    began = max((float(node.report.get("started_at") or 0.0) for node in run.nodes), default=run.started_at)
    for event in reversed(run.events):
        if event["event"] in ("run_succeeded", "run_failed") and event["t"] >= began:
            return "finished" if event["event"] == "run_succeeded" else "failed"
    if not run.nodes and not run.former and time.time() - run.started_at < 60.0:
        return "starting"  # run.json is written before the first report
    return "dead"


def _workers(node: NodeView) -> list[Json]:
    """A living agent knows its workers; what they say of themselves is in their beacons."""
    rows = []
    for row in node.report.get("workers", ()):
        beacon = node.beacons.get(row.get("local_rank"))
        if beacon is not None and beacon.pid == row.get("pid"):
            row = {
                **row, "phase": beacon.phase, "iteration": beacon.iteration, "snapshot": beacon.snapshot,
                "committed": beacon.committed, "stall_ms": round(1e3 * beacon.stall, 3),
                "state_bytes": beacon.state_bytes, "interval": beacon.interval or None,
            }  # fmt: skip
        rows.append(row)
    return rows


def _iteration(run: RunView) -> int | None:
    """Iterations that every worker has finished."""
    counts = [worker.get("iteration") for node in run.nodes for worker in _workers(node)]
    known = [count for count in counts if count is not None]
    return min(known) if known and len(known) == len(counts) else None


def _snapshots(run: RunView) -> Json:
    """How many iterations they are apart now, and why that is more than was asked for."""
    said = [worker.get("interval") for node in run.nodes for worker in _workers(node)]
    every = max((interval for interval in said if interval), default=None)
    asked = run.settings.get("snapshot_interval")
    reason = None
    if every is not None and asked is not None and every > asked:
        changes = (event for event in reversed(run.events) if event["event"] == "interval_changed")
        reason = next((event.get("reason") for event in changes if event.get("interval") == every), None)
    return {"every": every, "asked": asked, "reason": reason}


def _no_room(run: RunView) -> Json | None:
    """Ranks that have no room for their newest snapshots in this round, and since which iteration; None: none."""
    present = max((node.round for node in run.nodes if node.round is not None), default=None)
    newest: dict[Any, Json] = {}
    for event in run.events:
        if event["event"] in ("memory_full", "memory_free") and event.get("round") == present:
            newest[event.get("rank")] = event
    full = {rank: event for rank, event in newest.items() if event["event"] == "memory_full"}
    if not full or run_state(run) not in ("running", "recovering"):
        return None
    return {
        "ranks": sorted(full),
        "since": min(event["iteration"] for event in full.values()),
        "needed_bytes": max(event["needed_bytes"] for event in full.values()),
    }


def _node(node: NodeView) -> Json:
    report = node.report
    return {
        "node": node.node_id,
        "node_rank": node.node_rank,
        "state": node.state,
        "alive": node.alive,
        "hostname": report.get("hostname"),
        "pid": report.get("pid"),
        "address": report.get("address"),
        "updated_at": report.get("updated_at"),
        "memory_dir": str(node.memory.root) if node.memory else report.get("memory_dir"),
        "memory_bytes": _memory_bytes(node),
        "workers": _workers(node),
    }


def _memory_bytes(node: NodeView) -> int | None:
    """Bytes of host memory in use, None where nobody can say."""
    if node.memory is None:
        return int(node.report.get("memory_bytes") or 0) if node.alive else None
    total = 0
    for info in node.slots:
        try:
            total += info.path.stat().st_blocks * 512
        except FileNotFoundError:  # replaced or freed since it was listed
            continue
    return total


def _durable(run: RunView, reports: list[Json]) -> Json:
    told = [report["durable"] for report in reports if isinstance(report.get("durable"), dict)]
    location = run.durable or next((d.get("location") for d in told if d.get("location")), None)
    newest = [d["newest"] for d in told if d.get("newest") is not None]
    newest += [e["iteration"] for e in run.events if e["event"] == "persisted" and e.get("location") == location]
    return {
        "location": location,
        "iteration": max(newest, default=None),
        "failures": max((d.get("failures") or 0 for d in told), default=0),
    }


def _replicas(run: RunView, health: MemoryHealth, wanted: int | None) -> Json:
    names = {node.node_rank: node.node_id for node in run.nodes}
    asked = run.settings.get("replicas") or wanted
    return {
        "asked": asked,
        "wanted": wanted,
        "degraded": _degraded(run, health, asked, wanted),
        "iteration": health.at,
        "ranks": [
            {
                "rank": rank.rank,
                "copies": len(rank.holders),
                "nodes": [names.get(node_rank) for node_rank in rank.holders],
            }
            for rank in health.ranks
        ],
        "may_lose": [names.get(node_rank) for node_rank in health.expendable],
    }


def _degraded(run: RunView, health: MemoryHealth, asked: int | None, wanted: int | None) -> bool:
    """Whether a job that goes on has fewer copies than were asked for, since its nodes changed.

    Seen in the slots; or, as those of other machines are known as of different moments, by the workers' word: a commit
    of this round made all copies.
    """
    if run_state(run) not in ("running", "recovering") or wanted is None or asked is None:
        return False
    if asked > wanted:  # more than there are nodes
        return True
    began = any((node.round or 0) > 0 for node in run.nodes) or not all(node.alive for node in run.nodes)
    if wanted < 2 or not began or health.replicated is not None:
        return False
    workers = [worker for node in run.nodes for worker in _workers(node)]
    committed = all(node.state in ("running", "finished") for node in run.nodes) and all(
        worker.get("interval") for worker in workers
    )
    return not (committed and len(workers) == sum(run.local_world_sizes()))


def _last_failure(run: RunView, reports: list[Json]) -> Json | None:
    for event in reversed(run.events):
        if event["event"] in FAILURES and not event.get("consequence"):
            return {"t": event["t"], "event": event["event"], "node": event.get("node"), "cause": _cause(event),
                    "rank": event.get("rank"), "iteration": event.get("iteration")}  # fmt: skip
    told = [report["last_failure"] for report in reports if isinstance(report.get("last_failure"), dict)]
    if not told:
        return None
    last: dict[str, Any] = max(told, key=lambda failure: failure.get("t") or 0.0)
    return {"t": last.get("t"), "event": None, "node": None, "cause": last.get("cause"), "rank": None,
            "iteration": None}  # fmt: skip


def _cause(event: Json) -> str:
    cause = event.get("cause") or event.get("reason") or event.get("error") or event["event"].replace("_", " ")
    if event["event"] == "worker_failed":
        verb = "was " if event.get("signal") else ""
        where = "" if event.get("iteration") is None else f" at iteration {event['iteration']}"
        return f"worker rank {event.get('rank')} (pid {event.get('pid')}) {verb}{cause}{where}"
    return str(cause)
