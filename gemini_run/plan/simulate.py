"""Monte-Carlo checks of what the formulas say: odds of recovery by drawing losses, goodput by playing failures. Pure:
randomness comes in as an argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import log, sqrt
from typing import Protocol

from gemini_run.plan.job import DAY, Job
from gemini_run.plan.placement import Placement


class Random(Protocol):
    """What is used of `random.Random`."""

    def random(self) -> float: ...

    def sample(self, population: Sequence[int], k: int) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over trials and its standard error."""

    mean: float
    error: float

    def agrees(self, value: float, errors: float = 4.0) -> bool:
        """Whether `value` lies within so many standard errors; four are exceeded once in 16,000 times."""
        return abs(self.mean - value) <= errors * self.error + 1e-12


def _estimate(values: Sequence[float]) -> Estimate:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return Estimate(mean, sqrt(variance / len(values)))


def draw_losses(
    plan: Placement, count: int, trials: int, rng: Random, *, domains: Sequence[str] | None = None
) -> Estimate:
    """Part of `trials` in which every shard keeps a copy when `count` nodes are lost; whole domains with `domains`.

    Raises: ValueError for more than there are.
    """
    units: dict[object, list[int]] = {}
    for node in range(plan.num_nodes):
        units.setdefault(node if domains is None else domains[node], []).append(node)
    members = list(units.values())
    if not 0 <= count <= len(members):
        raise ValueError(f"{count} of {len(members)} cannot be lost")
    holders = [plan.holders(node) for node in range(plan.num_nodes)]
    good = []
    for _ in range(trials):
        lost = {node for unit in rng.sample(range(len(members)), count) for node in members[unit]}
        # Only the owner's own set can be lost whole if the owner is: each set contains its owner.
        good.append(float(all(any(holder not in lost for holder in holders[node]) for node in lost)))
    return _estimate(good)


@dataclasses.dataclass
class _Cluster:
    """Which failure comes next, and which spares are there."""

    job: Job
    rng: Random
    now: float = 0.0

    def __post_init__(self) -> None:
        self.on_order: list[float] = []
        step = self.job.domain_nodes or self.job.num_nodes
        self.domains = [range(i, min(i + step, self.job.num_nodes)) for i in range(0, self.job.num_nodes, step)]

    def next(self) -> tuple[float, frozenset[int]]:
        """Time of the next failure after `now`, and the nodes that it takes (none: processes died)."""
        job = self.job
        self.now += -log(1.0 - self.rng.random()) / job.rate
        kind = self.rng.random() * job.rate
        if kind < job.node_rate:
            return self.now, frozenset(self.rng.sample(range(job.num_nodes), 1))
        if kind < job.node_rate + job.domain_rate:
            return self.now, frozenset(self.domains[self.rng.sample(range(len(self.domains)), 1)[0]])
        return self.now, frozenset()

    def wait(self, at: float, lost: int) -> float:
        """Until `lost` new nodes are there; the order goes out at once."""
        self.on_order = [back for back in self.on_order if back > at]
        free = self.job.spares - len(self.on_order)
        self.on_order += [at + self.job.replacement_s] * lost
        return 0.0 if free >= lost else self.job.replacement_s


def play_gemini(job: Job, durable_interval_s: float, days: float, trials: int, rng: Random) -> Estimate:
    """Goodput of the GEMINI policy over `days` from a cold start, failure by failure.

    Unlike the formula it keeps each lost node's copies short until its replacement holds them, restarts a recovery
    that a failure interrupts, waits for the right number of nodes, and counts whole checkpoints.
    """
    return _estimate([_one_run(job, durable_interval_s, days * DAY, rng) for _ in range(trials)])


def _one_run(job: Job, durable_interval_s: float, end: float, rng: Random) -> float:
    cluster = _Cluster(job, rng)
    holders = [job.placement.holders(node) for node in range(job.num_nodes)]
    interval = job.memory_interval * job.iteration_s
    slowed = durable_interval_s / (durable_interval_s + job.held_stall_s)
    period = interval / slowed
    delay = job.transfer_s / job.network_share
    base = job.detection_s + job.restart_s

    safe = 0.0  # work that memory holds at the start of the present stretch
    started = 0.0
    due, durable = durable_interval_s + job.held_stall_s, 0.0
    uploads: list[tuple[float, float]] = []  # (complete at, work)
    failed, lost_now = cluster.next() if job.rate else (end, frozenset[int]())
    while failed < end:
        # The stretch of training that this failure ends: durable checkpoints that fell into it.
        while due <= failed:
            uploads.append((due + job.upload_s, safe + max(0.0, (due - started) // period * interval)))
            due += durable_interval_s + job.held_stall_s
        reach = failed - started - (delay if lost_now else 0.0)
        safe += max(0.0, reach // period * interval)

        # Down, until no further failure comes before training runs again.
        lost, at, ready, upload_from = set(lost_now), failed, failed, False
        while True:
            ready = max(ready, at + (cluster.wait(at, len(lost_now)) if lost_now else 0.0))
            upload_from = upload_from or any(set(holders[node]) <= lost for node in lost)
            load = job.upload_s if upload_from else (job.fetch_s if lost else 0.0)
            back = ready + base + load
            following, more = cluster.next()
            if following >= back:
                break
            at, lost_now = following, more
            lost |= more
        if upload_from:
            done = [work for complete, work in uploads if complete <= failed]
            durable = done[-1] if done else durable
            # What was being uploaded is lost with the memory that it came from.
            uploads, safe = [(0.0, durable)], durable
        due += max(0.0, back - failed)  # the interval counts training
        started, failed, lost_now = back, following, more
    return (safe + max(0.0, (end - started) // period * interval)) / end if end > started else safe / end
