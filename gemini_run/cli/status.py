"""``gemini-run status``: the runs on this machine, and one of them in full."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gemini_run.cli.summary import STATUS_VERSION, brief, summarise
from gemini_run.cli.view import Json, known_runs, load_run

WATCH_SECONDS = 1.0
SHOWN_RUNS = 10
OVER = ("finished", "failed", "stopped", "dead")
_STYLES = {
    "running": "green", "finished": "green", "succeeded": "green", "recovering": "yellow", "rendezvous": "yellow",
    "starting": "yellow", "stopped": "yellow", "failed": "bold red", "dead": "bold red", "spare": "cyan",
}  # fmt: skip
_HELP = """Show the runs of this machine and, in full, the run RUN_ID (default: the newest).

It only reads, and never disturbs a running job. The state of a run is starting, running, recovering, finished,
failed, stopped (by a signal) or dead (its agents are gone and none said why).

\b
--json prints one document; keys are only ever added:
  version     1
  runs        (without RUN_ID) newest first: run_id, state, iteration, started_at, script
  run         run_id, state, started_at, script, argv, directory, round, iteration,
              lag (iterations not yet safe), world_size, iterations_lost, restarts, memory_bytes
    snapshots     every (iterations between two), asked, reason (where the network made it more than asked)
    no_room       ranks whose snapshots do not fit into host memory, since (iteration),
                  needed_bytes; or null
    nodes         by node rank, spares last: node, node_rank, state, alive, hostname, pid, address,
                  updated_at, memory_dir, memory_bytes, workers (local_rank, rank, pid,
                  phase, iteration, snapshot, committed, stall_ms, state_bytes, interval)
    former_nodes  the same, of nodes no longer part of the run
    tiers         local_memory, peer_memory, durable: the newest complete iteration of each
    replicas      asked, wanted (fewer where there are fewer nodes), degraded (fewer copies than
                  asked since the nodes changed, until made again), iteration,
                  ranks (rank, copies, nodes), may_lose (nodes)
    last_failure  t, event, node, cause, rank, iteration; or null
    slot_problems node, file, problem
Unknown is null; times are unix seconds.
"""


@click.command(
    help=_HELP, short_help="Runs and their health.", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("run_id", required=False)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, one document.")
@click.option("--watch", is_flag=True, help="Again each second, until the run is over.")
@click.option("--debug", is_flag=True, hidden=True)
def status(run_id: str | None, as_json: bool, watch: bool, debug: bool) -> None:
    """Raises: UnknownRun."""
    console = Console(highlight=False, emoji=False)
    try:
        while True:
            document = collect(run_id)
            if as_json:
                # Watching: one document a line, for readers that take lines.
                print(json.dumps(document, indent=None if watch else 1), flush=True)
            else:
                if watch and console.is_terminal:
                    console.clear()
                console.print(render(document))
            over = document["run"] is None or document["run"]["state"] in OVER
            if not watch or over:
                return
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        if not watch:
            raise
    except BrokenPipeError:  # the reader has seen enough (| head)
        sys.stderr.close()


def collect(run_id: str | None) -> Json:
    """The document that ``--json`` prints. Raises: UnknownRun."""
    if run_id is not None:
        return {"version": STATUS_VERSION, "run": summarise(load_run(run_id))}
    runs = [load_run(known) for known in known_runs()[:100]]
    return {
        "version": STATUS_VERSION,
        "runs": [brief(run) for run in runs],
        "run": summarise(runs[0]) if runs else None,
    }


# --- for people ----------------------------------------------------------------------------------------


def render(document: Json) -> RenderableType:
    """The document as tables, readable at 80 columns."""
    if document["run"] is None:
        return Text("no runs on this machine yet; start one with: gemini-run train.py")
    parts: list[RenderableType] = []
    if len(document.get("runs", ())) > 1:
        parts += [_runs(document["runs"]), ""]
    run = document["run"]
    parts += [_head(run)]
    if run["nodes"]:
        parts += ["", _nodes(run)]
    if any(node["workers"] for node in run["nodes"]):
        parts += ["", _workers(run)]
    parts += ["", _tiers(run)]
    parts += [Text(f"  {problem['file']}: {problem['problem']}", "yellow") for problem in run["slot_problems"]]
    return Group(*parts)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _runs(runs: list[Json]) -> Table:
    table = _table("RUN", "STATE", "ITERATION", "STARTED", "SCRIPT", right=("ITERATION",))
    for run in runs[:SHOWN_RUNS]:
        script = str(run["script"] or "").rsplit("/", 1)[-1]
        table.add_row(run["run_id"], _state(run["state"]), _number(run["iteration"]), _ago(run["started_at"]), script)
    if len(runs) > SHOWN_RUNS:
        table.add_row(f"and {len(runs) - SHOWN_RUNS} older")
    return table


def _head(run: Json) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("run", run["run_id"])
    state = _state(run["state"])
    if run["replicas"]["degraded"]:
        state.append(f", degraded: {_shortage(run['replicas'])}", "yellow")
    table.add_row("state", state)
    if run["round"] is not None:
        restarts = f", {run['restarts']} restart(s)" if run["restarts"] else ""
        table.add_row("round", f"{run['round']}{restarts}, {run['iterations_lost']} iteration(s) repeated so far")
    if run["iteration"] is not None:
        lag = "" if not run["lag"] else f", {run['lag']} of them not yet safe"
        table.add_row("iteration", f"{run['iteration']} finished{lag}")
    snapshots = run["snapshots"]
    if (snapshots["every"] or 1) > 1:
        why = f": {snapshots['reason']}" if snapshots["reason"] else ""
        table.add_row("snapshots", f"every {snapshots['every']} iterations{why}")
    failure = run["last_failure"]
    if failure:
        table.add_row("last failure", Text(f"{failure['cause']} ({_ago(failure['t'])})", "red"))
    memory = Text(_size(run["memory_bytes"]))
    if (full := run["no_room"]) is not None:
        ranks = ", ".join(map(str, full["ranks"]))
        memory.append(
            f", no room for new checkpoints of rank(s) {ranks} since iteration {full['since']}: "
            f"{_size(full['needed_bytes'])} more are needed",
            "red",
        )
    table.add_row("memory", memory)
    table.add_row("directory", run["directory"])
    return table


def _nodes(run: Json) -> Table:
    table = _table("NODE", "ID", "STATE", "HOST", "MEMORY", "REPORTED", right=("MEMORY",))
    for node in run["nodes"]:
        table.add_row(
            _number(node["node_rank"]), node["node"], _state(node["state"]), node["hostname"] or "-",
            _size(node["memory_bytes"]), _ago(node["updated_at"]),
        )  # fmt: skip
    for node in run["former_nodes"]:
        table.add_row("-", node["node"], Text("gone", "dim"), node["hostname"] or "-", "-", _ago(node["updated_at"]))
    return table


def _workers(run: Json) -> Table:
    right = ("RANK", "ITERATION", "SNAPSHOT", "SAFE", "STALL", "STATE SIZE", "COPIES")
    table = _table("RANK", "NODE", "PID", "PHASE", *right[1:], right=right)
    copies = {entry["rank"]: entry["copies"] for entry in run["replicas"]["ranks"]}
    for node in run["nodes"]:
        for worker in node["workers"]:
            stall = worker.get("stall_ms")
            table.add_row(
                str(worker["rank"]), _number(node["node_rank"]), str(worker["pid"]), worker.get("phase", "-"),
                _number(worker.get("iteration")), _number(worker.get("snapshot")), _number(worker.get("committed")),
                "-" if stall is None else f"{stall:.1f} ms", _size(worker.get("state_bytes")),
                _copies(copies.get(worker["rank"]), run["replicas"]["wanted"]),
            )  # fmt: skip
    return table


def _tiers(run: Json) -> Table:
    tiers, replicas = run["tiers"], run["replicas"]
    table = _table("NEWEST COMPLETE ITERATION", "", "", right=("",))
    local, peer, durable = tiers["local_memory"], tiers["peer_memory"], tiers["durable"]
    table.add_row("local memory", _number(local["iteration"]), "every rank on its own node")
    wanted = replicas["wanted"]
    alone = "no replicas (one node, or --replicas 1)" if wanted == 1 else "every rank on another node"
    table.add_row("peer memory", _number(peer["iteration"]), alone)
    where = durable["location"] or "none (--durable names one)"
    trouble = f", {durable['failures']} attempt(s) failed in a row" if durable["failures"] else ""
    table.add_row("durable tier", _number(durable["iteration"]), f"{where}{trouble}")
    if replicas["ranks"] and run["state"] in ("running", "recovering"):
        names = [str(name) for name in replicas["may_lose"]]
        losable = f"any one of {', '.join(names)}" if len(names) > 1 else (names[0] if names else "none")
        table.add_row("nodes that may die now", "", losable)
    return table


def _shortage(replicas: Json) -> str:
    asked, wanted = replicas["asked"], replicas["wanted"]
    if asked > wanted:
        return f"{asked} copies were asked for and there are {wanted} node(s)"
    short = [entry["rank"] for entry in replicas["ranks"] if entry["copies"] < wanted]
    who = f"{len(short)} of {len(replicas['ranks'])} rank(s) have" if short else "no rank is known to have"
    return f"{who} {'fewer than ' if short else ''}{wanted} copies"


def _copies(copies: int | None, wanted: int | None) -> Text:
    if copies is None:
        return Text("-")
    text = str(copies) if wanted is None else f"{copies}/{wanted}"
    return Text(text, "yellow" if wanted is not None and copies < wanted else "")


def _state(state: str) -> Text:
    return Text(state, _STYLES.get(state, ""))


def _number(value: Any) -> str:
    return "-" if value is None else str(value)


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _ago(t: float | None) -> str:
    if not t:
        return "-"
    seconds = max(0.0, time.time() - t)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
