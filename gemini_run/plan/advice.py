"""How many replicas, and how often to the durable tier: the choice and its reason. Pure."""

from __future__ import annotations

import dataclasses

from gemini_run.plan.goodput import Outcome, best_interval, durable_only, fatal_rate, gemini, no_checkpoints
from gemini_run.plan.job import Job

#: the paper's interval (3.1) and gemini-run's default: longer gains nothing that the model could tell
LONGEST_S = 3 * 3600.0
#: less goodput than this is not worth another copy
WORTH = 0.001
#: with less goodput than this at best, every bit counts
HOPELESS = 0.01
MOST_REPLICAS = 4


@dataclasses.dataclass(frozen=True)
class Interval:
    """Useful seconds between durable checkpoints, and why."""

    seconds: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """One number of replicas: what it gives and needs, and whether it fits (None: the host's memory is not known)."""

    replicas: int
    outcome: Outcome
    host_memory_bytes: float
    fits: bool | None


@dataclasses.dataclass(frozen=True)
class Advice:
    """The recommended number of replicas (None: none fits), its durable interval, and the reasons.

    Attributes:
        choices: what was compared, by replicas.
    """

    replicas: int | None
    reason: str
    interval: Interval
    choices: tuple[Choice, ...]


def durable_alone_choice(job: Job) -> Interval:
    """The best interval where the durable tier is all there is: every failure counts, training waits while its state
    is serialised."""
    return _interval(job, job.rate, job.serialize_s, "failures")


def durable_choice(job: Job) -> Interval:
    """The best interval beneath copies in memory: only what memory does not recover counts."""
    return _interval(job, fatal_rate(job), job.held_stall_s, "failures that memory does not recover")


def _interval(job: Job, rate: float, stall: float, what: str) -> Interval:
    if job.durable_interval_s is not None:
        return Interval(job.durable_interval_s, "as given")
    best, least = best_interval(rate, stall), max(job.upload_s, job.iteration_s)
    if best < least:
        limit = "one upload takes" if least == job.upload_s else "one iteration takes"
        return Interval(least, f"{limit} that long; {what} alone would ask for {_time(best)}")
    if best > LONGEST_S >= least:
        return Interval(LONGEST_S, f"{what} are too rare to decide it; bounds what the rest can cost")
    mean = f"one in {_time(1 / rate)}" if rate else "none"
    return Interval(best, f"balances {_time(stall)} of stall against {what} ({mean})")


def advise(job: Job, host_memory_bytes: float | None = None) -> Advice:
    """The fewest replicas whose goodput is within `WORTH` of the best, of those that fit in host memory.

    Args:
        host_memory_bytes: of one node, for slots; None: any amount.
    """
    choices = []
    for replicas in range(1, min(MOST_REPLICAS, job.num_nodes) + 1):
        other = job.with_replicas(replicas)
        needs = other.host_memory_bytes + other.held_bytes
        fits = None if host_memory_bytes is None else needs <= host_memory_bytes
        choices.append(Choice(replicas, gemini(other, durable_choice(other).seconds), needs, fits))
    possible = [choice for choice in choices if choice.fits is not False]
    if not possible:
        needs = choices[0].host_memory_bytes
        reason = f"not even one copy fits: {_size(needs)} of host memory needed per node"
        return Advice(None, reason, durable_alone_choice(job), tuple(choices))
    best = max(choice.outcome.goodput for choice in possible)
    worth = WORTH if best >= HOPELESS else 0.0
    chosen = next(choice for choice in possible if choice.outcome.goodput >= best - worth)
    interval = durable_choice(job.with_replicas(chosen.replicas))
    reason = _reason(chosen, choices)
    if best < HOPELESS:
        reason = f"goodput stays below {HOPELESS:.0%}: failures come faster than training gets going again; {reason}"
    return Advice(chosen.replicas, reason, interval, tuple(choices))


def _reason(chosen: Choice, choices: list[Choice]) -> str:
    parts = [f"{_share(chosen)} of failures would lose every copy of a shard"]
    by_replicas = {choice.replicas: choice for choice in choices}
    fewer, more = by_replicas.get(chosen.replicas - 1), by_replicas.get(chosen.replicas + 1)
    if fewer is not None:
        parts.append(f"with {fewer.replicas}: {_share(fewer)}, goodput {fewer.outcome.goodput:.4f}")
    if more is not None:
        if more.fits is False:
            parts.append(f"{more.replicas} do not fit in host memory")
        else:
            gain = more.outcome.goodput - chosen.outcome.goodput
            much = f"raise goodput by {gain:.4f}" if gain >= 0.00005 else "not raise goodput"
            extra = more.host_memory_bytes - chosen.host_memory_bytes
            parts.append(f"{more.replicas} would {much}, for {_size(extra)} more per node")
    return "; ".join(parts)


def _share(choice: Choice) -> str:
    return f"{choice.outcome.fatal_share * 100:.2g} %" if choice.outcome.fatal_share < 0.9995 else "all"


def outcomes(job: Job) -> tuple[Outcome, Outcome, Outcome]:
    """No checkpoints, the durable tier alone, GEMINI; each with its own durable interval."""
    alone, beneath = durable_alone_choice(job), durable_choice(job)
    return no_checkpoints(job), durable_only(job, alone.seconds), gemini(job, beneath.seconds)


def _time(seconds: float) -> str:
    for unit, size in (("years", 365.25 * 86400), ("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _size(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
