"""What a job loses to failures: without checkpoints, with the durable tier alone, and with copies in memory. Pure.

Words: *goodput*, the part of wall time that ends up in the result; *wasted time* of a failure, as the paper defines it
(section 2): t_ckpt + 1/(2f) + t_rtvl, without detection, replacement and restart, which are *down time*.

Failures are Poisson (of nodes, of whole failure domains, of processes), also while the job is down. Then, for work
`w` made safe once in a `period`, usable `delay` after the period's end, and `down` to get going again, a stretch
between failures makes floor((x - delay)/period) * w safe and costs 1/rate + (exp(rate*down) - 1)/rate, so

    goodput = rate * w * exp(-rate * (delay + down)) / (exp(rate * period) - 1)

With delay = 0 that is Daly's expected run time (Future Generation Computer Systems 22, 2006); its linear term in
`rate` is w/period * (1 - rate * (delay + period/2 + down)): the paper's wasted time, and down time.
"""

from __future__ import annotations

import dataclasses
from math import exp, expm1, log1p

from gemini_run.plan.job import Job


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one way of checkpointing gives.

    Attributes:
        policy: "none", "durable" or "gemini".
        goodput: 0..1.
        wasted_s: mean wasted time of a failure; None without checkpoints, where it is all that was done.
        down_s: mean time from a failure until training runs again.
        interval_s: between checkpoints that recovery normally uses; None without checkpoints.
        durable_interval_s: between durable checkpoints; None without.
        fatal_share: of failures, those that memory does not recover.
        stall_share: of wall time without failures, what checkpoints take from training.
    """

    policy: str
    goodput: float
    wasted_s: float | None
    down_s: float
    interval_s: float | None
    durable_interval_s: float | None
    fatal_share: float
    stall_share: float


def renewal_goodput(*, rate: float, work: float, period: float, delay: float, down: float) -> float:
    """The formula of this module. `rate` per second; the rest in seconds, `work` as useful seconds in a `period`."""
    if rate * (period + delay + down) > 700:  # exp would overflow, and so small a goodput is none
        return 0.0
    if rate == 0:
        return work / period
    return rate * work * exp(-rate * (delay + down)) / expm1(rate * period)


def best_interval(rate: float, stall: float) -> float:
    """The useful seconds between checkpoints that maximise `renewal_goodput` when each costs `stall`, for delay and
    down of any length: the root of exp(rate * (t + stall)) * (1 - rate * t) = 1, about sqrt(2 * stall / rate) (Young,
    1974). 0 for a stall of 0, infinite for a rate of 0.
    """
    if rate == 0 or stall == 0:
        return 0.0 if rate else float("inf")
    low, high = 0.0, 1 / rate
    for _ in range(200):
        middle = (low + high) / 2
        if rate * (middle + stall) + log1p(-rate * middle) > 0:  # its logarithm, which does not cancel
            low = middle
        else:
            high = middle
    return low


def no_checkpoints(job: Job) -> Outcome:
    """Every failure starts the training of `duration_s` again."""
    down = job.detection_s + job.restart_s + _mean_wait(job)
    value = renewal_goodput(rate=job.rate, work=job.duration_s, period=job.duration_s, delay=0.0, down=down)
    return Outcome("none", value, None, down, None, None, 1.0, 0.0)


def durable_only(job: Job, interval_s: float) -> Outcome:
    """All nodes serialise their part every `interval_s` of training, which waits, and upload it meanwhile; everyone
    loads from the durable tier after any failure."""
    down = job.detection_s + job.restart_s + _mean_wait(job) + job.upload_s
    period = interval_s + job.serialize_s
    value = renewal_goodput(rate=job.rate, work=interval_s, period=period, delay=job.upload_s, down=down)
    wasted = job.serialize_s + job.upload_s + period / 2 + job.upload_s
    return Outcome("durable", value, wasted, down, period, period, 1.0, job.serialize_s / period)


def gemini(job: Job, durable_interval_s: float) -> Outcome:
    """Every `memory_interval` iterations into memory, every `durable_interval_s` into the durable tier.

    Two levels, each by the formula of this module: what memory recovers slows training to some goodput; at that speed
    it goes from one fall back to the durable tier to the next.
    """
    of_nodes, of_domains = job.fatal_share
    fatal_rate = job.node_rate * of_nodes + job.domain_rate * of_domains
    from_peers = job.node_rate * (1 - of_nodes) + job.domain_rate * (1 - of_domains)
    mild_rate = from_peers + job.process_rate
    part = from_peers / mild_rate if mild_rate else 0.0  # of what memory recovers, what needs peers

    interval = job.memory_interval * job.iteration_s
    # The copy on the own node is there at once; those on peers when their traffic is through.
    delay = job.transfer_s / job.network_share
    base = job.detection_s + job.restart_s
    mild_down = base + (_peer_wait(job) + job.fetch_s) * part
    inner = renewal_goodput(rate=mild_rate, work=interval, period=interval, delay=delay * part, down=mild_down)

    fatal_down = base + _fatal_wait(job) + job.upload_s
    stall = job.held_stall_s
    period = durable_interval_s + stall
    value = renewal_goodput(
        rate=fatal_rate, work=inner * durable_interval_s, period=period, delay=job.upload_s, down=fatal_down
    )
    share = fatal_rate / job.rate if job.rate else 0.0
    mild = delay * part + interval / 2 + job.fetch_s * part
    fatal = job.upload_s + durable_interval_s / 2 + job.upload_s
    return Outcome(
        "gemini", value, mild * (1 - share) + fatal * share, mild_down * (1 - share) + fatal_down * share, interval,
        durable_interval_s, share, stall / period,
    )  # fmt: skip


def fatal_rate(job: Job) -> float:
    """Failures per second after which memory is not enough."""
    return job.node_rate * job.fatal_share[0] + job.domain_rate * job.fatal_share[1]


def _mean_wait(job: Job) -> float:
    total = job.node_rate * job.wait_s(1) + job.domain_rate * job.wait_s(job.domain_nodes or 1)
    return total / job.rate if job.rate else 0.0


def _peer_wait(job: Job) -> float:
    nodes, domains = job.node_rate * (1 - job.fatal_share[0]), job.domain_rate * (1 - job.fatal_share[1])
    total = nodes * job.wait_s(1) + domains * job.wait_s(job.domain_nodes or 1)
    return total / (nodes + domains) if nodes + domains else 0.0


def _fatal_wait(job: Job) -> float:
    nodes, domains = job.node_rate * job.fatal_share[0], job.domain_rate * job.fatal_share[1]
    several = min(job.replicas, job.num_nodes)
    total = nodes * job.wait_s(several) + domains * job.wait_s(job.domain_nodes or 1)
    return total / (nodes + domains) if nodes + domains else 0.0
