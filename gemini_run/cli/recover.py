"""``gemini-run recover``: what can be had back and from where, and the newest checkpoint as plain files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemini_run.cli.copies import Overwritten
from gemini_run.cli.salvage import (
    ATTEMPTS,
    PAUSE_SECONDS,
    Salvage,
    check_target,
    find,
    nothing_found,
    salvage,
    stage,
)
from gemini_run.errors import GeminiError
from gemini_run.terminal import say

RECOVER_VERSION = 1
_HELP = """Show what can be recovered of a run and from where; with --to, export it.

TARGET is a run id (default: the newest run of this machine), a durable tier (a directory or s3://bucket/prefix),
or a memory directory below /dev/shm. It works while the job runs, and when job and agents are dead as long as
the memory or the durable tier is there. It only reads, and never holds up a running job.

\b
Formats of --to PATH (which must not exist yet):
  torch   one file for torch.load(PATH): {"iteration": k, <component>: state_dict, ...,
          "ranks": [per rank its "rng" and what differs from rank 0]}
  dcp     a directory for torch.distributed.checkpoint.load

\b
--json prints one document; keys are only ever added:
  version      1
  target, run_id
  source       memory, durable or none
  iteration    iterations finished in that state, or null
  reason       the choice in words
  ranks        rank, iteration, tier, node, source, bytes, why
  refused      file, problem: slots that cannot be used
  durable      location, iteration, problem
  exported     null, or path, format, bytes, left_out (values that only the script can read)
"""


@click.command(
    help=_HELP, short_help="Recovery plan and export.", context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("target", required=False, metavar="[RUN_ID|DIR|s3://...]")
@click.option("--to", "to", type=click.Path(path_type=Path), metavar="PATH", help="Export the checkpoint to PATH.")
@click.option(
    "--format", "form", type=click.Choice(["torch", "dcp"]), default="torch", show_default=True, help="Of the export."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, one document.")
@click.option("--debug", is_flag=True, hidden=True)
def recover(target: str | None, to: Path | None, form: str, dry_run: bool, as_json: bool, debug: bool) -> None:
    """Raises: UnknownRun, Unrecoverable, ConfigError, GeminiError."""
    if to is not None:
        check_target(to)
    place = find(target)
    exported: dict[str, Any] | None = None
    if to is None or dry_run:
        found = salvage(place)
    else:
        found = salvage(place, check=False)
        if found.plan.source != "none":
            found, exported = _export(found, to, form)
    if as_json:
        print(json.dumps(_document(found, exported), indent=1))
    else:
        _show(found)
    if found.plan.source == "none":
        raise nothing_found(found)
    if exported:
        if exported["left_out"] and not as_json:
            say(f"left out, as only the training script can read them: {', '.join(exported['left_out'])}")
        say(f"iteration {found.plan.iteration} exported to {to} ({form}, {exported['bytes'] / 2**20:.1f} MiB)")
    elif to is not None:
        say(f"dry run: iteration {found.plan.iteration} would be exported to {to} ({form})")


def _export(found: Salvage, to: Path, form: str) -> tuple[Salvage, dict[str, Any]]:
    """Copy out, then write; `to` appears whole or not at all."""
    # Beside the target: room is needed there anyway, and the last step is a rename.
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", suffix=".partial", dir=to.absolute().parent) as name:
        try:
            return _export_in(Path(name), found, to, form)
        except OSError as error:
            raise GeminiError(f"--to {to}: {error.strerror or error}; nothing was exported") from error


def _export_in(scratch: Path, found: Salvage, to: Path, form: str) -> tuple[Salvage, dict[str, Any]]:
    for attempt in range(ATTEMPTS):
        staging = scratch / f"slots{attempt}"
        staging.mkdir()
        try:
            slots = stage(found, staging)
            break
        except Overwritten:
            time.sleep(PAUSE_SECONDS)
        except GeminiError:
            if found.plan.source == "durable":
                raise
            # A damaged copy: plan again with every byte checked, which leaves it out.
        shutil.rmtree(staging)
        found = salvage(found.place)
        if found.plan.source == "none":
            raise nothing_found(found)
    else:
        raise GeminiError(
            f"{found.place.what}: the running job overwrites its slots faster than they can be copied; stop it first "
            "(its memory stays), or export from the durable tier"
        )
    from gemini_run.worker import export  # torch: only where something is written

    left_out: list[str] = []
    if form == "torch":
        made = scratch / "export"
        left_out = export.export_torch(slots, made)
        os.link(made, to)  # unlike a rename, never onto a file that has appeared meanwhile
        size = to.stat().st_size
    else:
        made = export.export_dcp(slots, scratch / "dcp", run_id=found.place.run_id or "", now=time.time())
        size = sum(path.stat().st_size for path in made.iterdir())
        os.rename(made, to)
    return found, {"path": str(to), "format": form, "bytes": size, "left_out": left_out}


def _document(found: Salvage, exported: dict[str, Any] | None) -> dict[str, Any]:
    ranks = [dataclasses.asdict(dataclasses.replace(rank, copy=None)) for rank in found.ranks]
    for rank in ranks:
        del rank["copy"]
        rank["bytes"] = rank.pop("num_bytes")
    return {
        "version": RECOVER_VERSION,
        "target": found.place.what,
        "run_id": found.place.run_id,
        "source": found.plan.source,
        "iteration": found.plan.iteration,
        "reason": found.plan.reason,
        "ranks": ranks,
        "refused": [{"file": path, "problem": problem} for path, problem in found.refused],
        "durable": {
            "location": found.place.durable,
            "iteration": found.durable_iteration,
            "problem": found.durable_problem,
        },
        "exported": exported,
    }


def _show(found: Salvage) -> None:
    console = Console(highlight=False, emoji=False)
    plan = found.plan
    if plan.iteration is not None:
        title = f"{found.place.what}: iteration {plan.iteration} can be recovered"
        console.print(Text(title, "bold"), soft_wrap=True)
        console.print(Text(plan.reason), soft_wrap=True)  # else the error that follows says it
    if found.durable_problem:
        console.print(Text(f"durable tier not read: {found.durable_problem}", "yellow"), soft_wrap=True)
    if found.ranks:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in ("RANK", "ITERATION", "TIER", "SOURCE", "WHY"):
            table.add_column(column, justify="right" if column in ("RANK", "ITERATION") else "left", overflow="fold")
        for rank in found.ranks:
            source = rank.source if rank.copy is None else f"{rank.copy.node}/{rank.copy.path.name}"
            why = "" if rank.copy is None else rank.why
            table.add_row(str(rank.rank), str(rank.iteration), rank.tier, source, why)
        console.print(table)
    for path, problem in found.refused:
        console.print(Text(f"refused {path}: {problem}", "yellow"), soft_wrap=True)
