"""``gemini-run plan`` as tables for people, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemini_run.cli.plan_input import BY_NAME, Request
from gemini_run.cli.quantities import show_share, show_size, show_time
from gemini_run.plan.checks import Check
from gemini_run.plan.paper import Figure

Json = dict[str, Any]
_POLICIES = {"none": "none", "durable": "durable only", "gemini": "GEMINI"}


def show(request: Request, document: Json) -> None:
    """The document of ``--json`` for people."""
    console = Console(highlight=False, emoji=False)

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    job = request.job
    shards = f"sharded over {job.shard_nodes or job.num_nodes} nodes"
    line(f"{job.num_nodes} nodes x {request.workers_per_node} workers, state of {show_size(job.state_bytes)}, {shards}",
         "bold")  # fmt: skip
    line(f"placement: {_placement(document, job.replicas)}")
    for sentence in document["placement"]["unavoided"]:
        line(f"not avoided: {sentence}", "yellow")
    if request.assumed:
        defaults = ", ".join(f"{name.replace('_', '-')} {BY_NAME[name].default}" for name in request.assumed)
        console.print(Text(f"assumed: {defaults}", "dim"))
    console.print()
    console.print(_odds(document, job.replicas))
    console.print()
    _memory(line, document)
    console.print()
    console.print(_policies(document))
    console.print()
    console.print(_choices(document))
    console.print()
    advice = document["advice"]
    if advice["replicas"] is None:
        line(f"recommended: {advice['reason']}", "bold red")
    else:
        line(f"recommended: --replicas {advice['replicas']}", "bold")
        line(f"  {advice['reason']}")
    chosen = next((c for c in advice["choices"] if c["replicas"] == job.replicas), None)
    beside = "" if chosen is None or advice["replicas"] == job.replicas else f" (with the {job.replicas} given)"
    line(f"durable interval{beside}: {show_time(advice['durable_interval_s'])}", "bold")
    line(f"  {advice['durable_reason']}")
    line(f"durable only would take {show_time(advice['durable_alone_interval_s'])}: {advice['durable_alone_reason']}")


def _placement(document: Json, replicas: int) -> str:
    place = document["placement"]
    sent = place["copies_sent"]
    if not sent:
        return f"{replicas} copies are there anyway, nothing is sent" if replicas > 1 else "local copies only"
    ring = len(place["ring"])
    groups = len([group for group in place["groups"] if len(group) > 1]) - bool(ring)
    text = f"{groups} group(s)" + (f" and a ring of {ring} nodes" if ring else "")
    return f"{replicas} copies in {text}; a node sends {sent}"


def _table(*columns: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def _odds(document: Json, replicas: int) -> Table:
    rows = document["recovery"]
    counts = sorted(int(m) for m in rows[0]["with_replicas"])
    extra = [] if replicas in counts else [replicas]
    table = _table("LOST AT ONCE", *(f"m={m}" for m in counts + extra), left=("LOST AT ONCE",))
    for row in rows:
        cells = [Text(show_share(row["with_replicas"][str(m)]), "bold" if m == replicas else "") for m in counts]
        cells += [Text(show_share(row["probability"]), "bold") for _ in extra]
        table.add_row(f"{row['lost']} node{'s' * (row['lost'] > 1)}", *cells)
    for row in document["domains"]:
        cells = [Text(show_share(row["probability"]), "bold") if m == replicas else Text("") for m in counts + extra]
        table.add_row(f"{row['lost']} domain{'s' * (row['lost'] > 1)}", *cells)
    return table


def _memory(line: Any, document: Json) -> None:
    memory, traffic = document["memory"], document["traffic"]
    held, worker = show_size(memory["held_bytes"]), show_size(memory["worker_bytes"])
    line(f"host memory per node: {show_size(memory['replicas_bytes'])} for copies")
    line(f"  and {held} while the durable tier takes a snapshot; the shard of a worker has {worker}")
    every = traffic["interval_iterations"]
    line(f"checkpoint into memory: every {'iteration' if every == 1 else f'{every} iterations'}")
    line(f"  replicas need {show_time(traffic['transfer_s'])} of the link, {show_share(traffic['share'])} of its time")


def _policies(document: Json) -> Table:
    table = _table("POLICY", "EVERY", "WASTED", "DOWN", "STALL", "NOT IN MEMORY", "GOODPUT", left=("POLICY",))
    for row in document["policies"]:
        table.add_row(
            _POLICIES[row["policy"]], show_time(row["interval_s"]),
            "all" if row["wasted_s"] is None else show_time(row["wasted_s"]), show_time(row["down_s"]),
            show_share(row["stall_share"]), show_share(row["fatal_share"]), f"{row['goodput']:.2%}",
        )  # fmt: skip
    return table


def _choices(document: Json) -> Table:
    table = _table("REPLICAS", "HOST MEMORY", "NOT IN MEMORY", "DURABLE EVERY", "GOODPUT", "")
    for row in document["advice"]["choices"]:
        note = Text("does not fit", "yellow") if row["fits"] is False else Text("")
        if row["replicas"] == document["advice"]["replicas"]:
            note = Text("recommended", "green")
        table.add_row(
            str(row["replicas"]), show_size(row["host_memory_bytes"]), show_share(row["fatal_share"]),
            show_time(row["durable_interval_s"]), f"{row['goodput']:.2%}", note,
        )  # fmt: skip
    return table


# --- the paper's figures -------------------------------------------------------------------------------


def show_reproduction(rows: Sequence[Figure], checks: Sequence[Check], seed: int, trials: int) -> None:
    console = Console(highlight=False, emoji=False)
    width = max(len(row.what) for row in rows)
    console.print(Text(f"{'FIGURE':<{width}}  {'PAPER':>8}  {'OURS':>10}", "bold"), soft_wrap=True)
    for row in rows:
        unit = f" {row.unit}" if row.unit else ""
        paper = f"{'' if row.relation == '=' else row.relation}{row.paper:g}{unit}"
        ours = "-" if row.ours is None else f"{row.ours:.3g}{unit}"
        head = Text(f"{row.what:<{width}}  {paper:>8}  {ours:>10}  ")
        console.print(head + _mark(row.agrees), soft_wrap=True)
        console.print(Text(f"    {row.note}", "dim"), soft_wrap=True)
    told = [row.agrees for row in rows if row.agrees is not None]
    console.print(
        f"{sum(told)} of {len(told)} agree: in the digits printed, or within 10 % where the paper says about;"
    )
    console.print(
        f"the other {len(rows) - len(told)} are settings and measurements of their cluster, which no model gives"
    )
    console.print()
    table = _table(f"MONTE CARLO, SEED {seed}, {trials} TRIALS", "FORMULA", "SIMULATED", "STD ERROR", "",
                   left=(f"MONTE CARLO, SEED {seed}, {trials} TRIALS",))  # fmt: skip
    for check in checks:
        table.add_row(
            check.what, f"{check.formula:.4f}", f"{check.estimate.mean:.4f}", f"{check.estimate.error:.4f}",
            _mark(check.agrees),
        )  # fmt: skip
    console.print(table)


def _mark(agrees: bool | None) -> Text:
    if agrees is None:
        return Text("")
    return Text("ok", "green") if agrees else Text("differs", "yellow")
