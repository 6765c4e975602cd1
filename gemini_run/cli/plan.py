"""``gemini-run plan``: what a cluster can survive, what that needs, and what it gives."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gemini_run.cli import plan_plot, plan_view
from gemini_run.cli.plan_input import OPTIONS, Request, resolve
from gemini_run.errors import ConfigError
from gemini_run.plan.advice import MOST_REPLICAS, Advice, advise, durable_alone_choice, durable_choice, outcomes
from gemini_run.plan.checks import Check, monte_carlo
from gemini_run.plan.paper import Figure, figures
from gemini_run.plan.probability import corollary_bound, domain_recovery, recovery_probability
from gemini_run.terminal import say

PLAN_VERSION = 1
_MOST_DOMAINS = 3
_HELP = """Say what a cluster can survive: odds of recovery from memory, host memory, checkpoint intervals, expected
wasted time and goodput without checkpoints, with the durable tier alone, and with copies in memory; how many
replicas and which durable interval to take, and why.

\b
  gemini-run plan --nodes 16 --parameters 100B --network 400Gbps --iteration 62s
  gemini-run plan --config cluster.yaml --spares 2 --plot odds.svg
  gemini-run plan --reproduce

What is not given is assumed, and said. The model: failures are Poisson; losses at once are uniform over nodes, or
over failure domains; a node's failure leaves its copies short until its replacement has them again.

\b
--json prints one document; keys are only ever added:
  version       1
  input         of the model: bytes, seconds, rates per day; assumed (names of options left to defaults)
  placement     groups, ring, copies_sent, unavoided
  recovery      lost, probability, with_replicas ("1".."4"), bound (Corollary 1; null where it says nothing)
  domains       lost, probability; [] without --domain-nodes
  memory        replicas_bytes, held_bytes (while the durable tier takes it), worker_bytes
  traffic       transfer_s, interval_iterations, share
  policies      policy, goodput, wasted_s, down_s, interval_s, durable_interval_s, fatal_share, stall_share
  advice        replicas, reason, durable_interval_s, durable_reason, durable_alone_interval_s,
                durable_alone_reason, choices
with --reproduce: version, figures (what, paper, ours, unit, relation, agrees, note),
                  checks (what, formula, simulated, error, agrees), seed, trials
"""


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(OPTIONS):
        text = option.help if option.default is None else f"{option.help} [default: {option.default}]"
        command = click.option(f"--{option.name.replace('_', '-')}", metavar=option.metavar, help=text)(command)
    return command


@click.command(
    help=_HELP, short_help="Odds, memory and goodput of a cluster.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@_options
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="These options as YAML.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, one document.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it: FILE.png or FILE.svg.")
@click.option("--reproduce", is_flag=True, help="The paper's figures beside ours, and Monte-Carlo checks.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the Monte-Carlo checks.")
@click.option("--trials", type=click.IntRange(min=100), default=10_000, show_default=True, help="Of each check.")
@click.option("--debug", is_flag=True, hidden=True)
def plan(
    config: Path | None, as_json: bool, plot: Path | None, reproduce: bool, seed: int, trials: int, debug: bool,
    **flags: str | None,
) -> None:  # fmt: skip
    """Raises: ConfigError, GeminiError."""
    if reproduce:
        _reproduce(config, plot, flags, seed, trials, as_json)
        return
    if plot is not None:
        plan_plot.check(plot)
    request = resolve(flags, config)
    advice = advise(request.job, request.host_memory_bytes)
    document = collect(request, advice)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        plan_view.show(request, document)
    if plot is not None:
        plan_plot.draw(request, document, plot)
        say(f"drawn: {plot}")


def collect(request: Request, advice: Advice) -> dict[str, Any]:
    """The document that ``--json`` prints."""
    job, most = request.job, request.losses
    place = job.placement
    odds = recovery_probability(place, most)
    by_replicas = {
        str(m): recovery_probability(job.with_replicas(m).placement, most)
        for m in range(1, min(MOST_REPLICAS, job.num_nodes) + 1)
    }
    plain = not place.alike and not place.ring
    domains = job.domains
    lost_domains = [] if domains is None else domain_recovery(place, domains, min(_MOST_DOMAINS, len(set(domains))))
    alone = durable_alone_choice(job)
    beneath = durable_choice(job)
    return {
        "version": PLAN_VERSION,
        "input": {
            **dataclasses.asdict(job), "workers_per_node": request.workers_per_node,
            "host_memory_bytes": request.host_memory_bytes, "assumed": list(request.assumed),
        },
        "placement": {
            "groups": [list(group) for group in place.groups], "ring": list(place.ring),
            "copies_sent": job.copies_sent, "unavoided": list(place.unavoided),
        },
        "recovery": [
            {
                "lost": k, "probability": float(odds[k]),
                "with_replicas": {m: float(values[k]) for m, values in by_replicas.items()},
                "bound": float(corollary_bound(job.num_nodes, job.replicas, k)) if plain else None,
            }
            for k in range(1, most + 1)
        ],
        "domains": [{"lost": d, "probability": float(p)} for d, p in enumerate(lost_domains) if d],
        "memory": {
            "replicas_bytes": job.host_memory_bytes, "held_bytes": job.held_bytes,
            "worker_bytes": job.node_bytes / request.workers_per_node,
        },
        "traffic": {
            "transfer_s": job.transfer_s, "interval_iterations": job.memory_interval,
            "share": job.transfer_s / (job.memory_interval * job.iteration_s),
        },
        "policies": [dataclasses.asdict(outcome) for outcome in outcomes(job)],
        "advice": {
            "replicas": advice.replicas, "reason": advice.reason,
            "durable_interval_s": beneath.seconds, "durable_reason": beneath.reason,
            "durable_alone_interval_s": alone.seconds, "durable_alone_reason": alone.reason,
            "choices": [
                {
                    "replicas": choice.replicas, "goodput": choice.outcome.goodput,
                    "fatal_share": choice.outcome.fatal_share, "host_memory_bytes": choice.host_memory_bytes,
                    "durable_interval_s": choice.outcome.durable_interval_s, "fits": choice.fits,
                }
                for choice in advice.choices
            ],
        },
    }  # fmt: skip


def _reproduce(
    config: Path | None, plot: Path | None, flags: dict[str, str | None], seed: int, trials: int, as_json: bool
) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
    given += [name for name, value in (("--config", config), ("--plot", plot)) if value is not None]
    if given:
        raise ConfigError(f"--reproduce has the paper's setting: leave out {', '.join(given)}")
    rows, checks = figures(), monte_carlo(random.Random(seed), trials)
    if not as_json:
        plan_view.show_reproduction(rows, checks, seed, trials)
        return
    document = {
        "version": PLAN_VERSION,
        "figures": [_figure(row) for row in rows],
        "checks": [_check(check) for check in checks],
        "seed": seed,
        "trials": trials,
    }
    print(json.dumps(document, indent=1))


def _figure(row: Figure) -> dict[str, Any]:
    return {
        "what": row.what, "paper": row.paper, "ours": row.ours, "unit": row.unit, "relation": row.relation,
        "agrees": row.agrees, "note": row.note,
    }  # fmt: skip


def _check(check: Check) -> dict[str, Any]:
    return {
        "what": check.what, "formula": check.formula, "simulated": check.estimate.mean,
        "error": check.estimate.error, "agrees": check.agrees,
    }  # fmt: skip
