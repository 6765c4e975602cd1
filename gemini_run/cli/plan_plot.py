"""``gemini-run plan --plot``: the odds of recovery, and goodput against the rate of failures. Needs matplotlib."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from gemini_run.cli.plan_input import Request
from gemini_run.errors import ConfigError, GeminiError
from gemini_run.plan.advice import outcomes

_KINDS = (".png", ".svg")
_COLOURS = ("#999999", "#4477aa", "#ee6677", "#228833", "#aa3377")
_LABELS = {"none": "no checkpoints", "durable": "durable only", "gemini": "GEMINI"}
_POINTS = 33


def check(target: Path) -> None:
    """Before anything is computed. Raises: ConfigError."""
    if target.suffix not in _KINDS:
        raise ConfigError(f"--plot {target}: the name must end in .png or .svg")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--plot {target}: no directory {target.absolute().parent}; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'gemini-run[plot]'")


def draw(request: Request, document: dict[str, Any], target: Path) -> None:
    """Write the picture to `target`. Raises: GeminiError where it cannot be written."""
    # The object-oriented interface: no display is looked for, no global state is left.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _odds(left, request, document)
    _goodput(right, request)
    job = request.job
    figure.suptitle(
        f"{job.num_nodes} nodes, {job.state_bytes / 1e12:.3g} TB of state, {job.replicas} replicas, "
        f"{job.spares} spare(s)", fontsize=11,
    )  # fmt: skip
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise GeminiError(f"--plot {target}: {error.strerror or error}") from error


def _odds(axes: Any, request: Request, document: dict[str, Any]) -> None:
    rows = document["recovery"]
    lost = [row["lost"] for row in rows]
    for colour, m in zip(_COLOURS, sorted(rows[0]["with_replicas"], key=int), strict=False):
        chosen = int(m) == request.job.replicas
        label = f"m = {m}" + (" (chosen)" if chosen else "")
        values = [row["with_replicas"][m] for row in rows]
        axes.plot(lost, values, marker="o", color=colour, linewidth=2.6 if chosen else 1.3, label=label)
    if request.job.replicas > len(rows[0]["with_replicas"]):
        values = [row["probability"] for row in rows]
        label = f"m = {request.job.replicas} (chosen)"
        axes.plot(lost, values, marker="o", color=_COLOURS[-1], linewidth=2.6, label=label)
    domains = document["domains"]
    if domains:
        axes.plot(
            [row["lost"] for row in domains], [row["probability"] for row in domains], marker="s", linestyle="--",
            color="black", label="whole domains lost",
        )  # fmt: skip
    axes.set(xlabel="lost at once", ylabel="probability of recovery from memory", ylim=(-0.03, 1.03), xticks=lost)
    axes.set_title("What memory survives", fontsize=10)
    axes.grid(alpha=0.3)
    _legend(axes)


def _goodput(axes: Any, request: Request) -> None:
    job = request.job
    centre = job.failures_per_node_day or 0.01
    rates = [centre * 10 ** (-1.5 + 3 * index / (_POINTS - 1)) for index in range(_POINTS)]
    curves: dict[str, list[float]] = {}
    for rate in rates:
        for outcome in outcomes(dataclasses.replace(job, failures_per_node_day=rate)):
            curves.setdefault(outcome.policy, []).append(outcome.goodput)
    for colour, (policy, values) in zip(_COLOURS, curves.items(), strict=False):
        axes.plot(rates, values, color=colour, linewidth=2, label=_LABELS[policy])
    axes.axvline(job.failures_per_node_day or centre, color="black", linestyle=":", linewidth=1)
    axes.set(
        xscale="log", xlabel="nodes lost, per node and day (dotted: as given)", ylabel="goodput", ylim=(-0.03, 1.03)
    )
    axes.set_title("What training gets", fontsize=10)
    axes.grid(alpha=0.3)
    _legend(axes)


def _legend(axes: Any) -> None:
    # Below the axes: any place inside would hide some curve of some cluster.
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
