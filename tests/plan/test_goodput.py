"""The goodput model: against its definition, its limits, and failures played one by one."""

from __future__ import annotations

import dataclasses
import itertools
import random
from math import exp, expm1, sqrt

import pytest

from gemini_run.plan.advice import LONGEST_S, WORTH, advise, durable_alone_choice, durable_choice, outcomes
from gemini_run.plan.checks import GOODPUT_TOLERANCE, Check, monte_carlo
from gemini_run.plan.goodput import best_interval, durable_only, gemini, no_checkpoints, renewal_goodput
from gemini_run.plan.job import DAY, Job, poisson_at_most
from gemini_run.plan.simulate import Estimate, draw_losses, play_gemini

JOB = Job(
    num_nodes=16, state_bytes=1.2e12, replicas=2, network_bytes_per_s=50e9, storage_bytes_per_s=2.5e9,
    iteration_s=62.0, failures_per_node_day=0.5,
)  # fmt: skip


def changed(**values: object) -> Job:
    return dataclasses.replace(JOB, **values)  # type: ignore[arg-type]


# --- the formula ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("delay", [0.0, 40.0, 500.0])
def test_renewal_goodput_is_its_definition(rate: float, delay: float) -> None:
    """Sum over how many periods a stretch between failures makes safe; a restart that failures interrupt."""
    work, period, down = 100.0, 110.0, 300.0
    tail = [exp(-rate * (n * period + delay)) for n in range(1, int(60 / rate / period))]
    useful = work * sum(tail)
    lasts = 1 / rate
    # Until `down` seconds pass without a failure: solve E = exp(-rate*down)*down + interrupted.
    survives = exp(-rate * down)
    interrupted = (1 - survives) / rate - down * survives
    restart = (survives * down + interrupted) / survives
    expected = useful / (lasts + restart)
    assert renewal_goodput(rate=rate, work=work, period=period, delay=delay, down=down) == pytest.approx(expected)


def test_renewal_goodput_for_rare_failures_is_the_papers_wasted_time() -> None:
    rate, work, period, delay, down = 1e-9, 100.0, 103.0, 40.0, 300.0
    linear = work / period * (1 - rate * (delay + period / 2 + down))
    value = renewal_goodput(rate=rate, work=work, period=period, delay=delay, down=down)
    assert value == pytest.approx(linear, abs=1e-12)
    assert renewal_goodput(rate=0.0, work=work, period=period, delay=delay, down=down) == work / period


def test_a_hopeless_job_has_no_goodput() -> None:
    assert renewal_goodput(rate=1.0, work=1e4, period=1e4, delay=0.0, down=0.0) == 0.0


@pytest.mark.parametrize("rate", [1e-15, 1e-8, 1e-5, 1e-3])
@pytest.mark.parametrize("stall", [0.5, 60.0])
def test_best_interval_is_the_best(rate: float, stall: float) -> None:
    best = best_interval(rate, stall)

    def loss(work: float) -> float:  # the part of a period that is lost; goodput itself rounds to 1
        return stall / (work + stall) + rate * (work + stall) / 2

    if rate * stall < 1e-4:
        assert best == pytest.approx(sqrt(2 * stall / rate), rel=0.02)  # Young
        assert loss(best) <= min(loss(best * 1.2), loss(best / 1.2))

    def value(work: float) -> float:
        return renewal_goodput(rate=rate, work=work, period=work + stall, delay=70.0, down=20.0)

    assert value(best) >= max(value(best * 1.1), value(best / 1.1)) - 1e-12


def test_best_interval_at_its_ends() -> None:
    assert best_interval(0.0, 5.0) == float("inf")
    assert best_interval(1e-3, 0.0) == 0.0


def test_poisson() -> None:
    assert poisson_at_most(0, 2.0) == pytest.approx(exp(-2))
    assert poisson_at_most(2, 2.0) == pytest.approx(exp(-2) * 5)
    assert poisson_at_most(3, 0.0) == 1.0
    assert poisson_at_most(5000, 1000.0) == pytest.approx(1.0)


# --- what follows from a job ---------------------------------------------------------------------------


def test_memory_and_traffic() -> None:
    assert JOB.host_memory_bytes == 2 * 2 * 1.2e12 / 16
    assert changed(replicas=3).host_memory_bytes == 2 * 3 * 1.2e12 / 16
    assert JOB.transfer_s == pytest.approx(75e9 / 50e9)
    assert JOB.upload_s == 480
    assert JOB.memory_interval == 1


def test_traffic_that_does_not_fit_lowers_the_frequency() -> None:
    slow = changed(network_bytes_per_s=75e9 / 62 / 2)  # two iterations of link time, half of which is left
    assert slow.memory_interval == 4
    assert gemini(slow, 3600.0).interval_s == 4 * 62


def test_shards_held_alike_are_neither_sent_nor_kept_twice() -> None:
    hybrid = changed(shard_nodes=8)
    assert hybrid.copies_sent == 0 and hybrid.host_memory_bytes == 2 * 1.2e12 / 8
    assert hybrid.transfer_s == 0 and hybrid.fetch_s > 0
    assert changed(shard_nodes=8, replicas=3).copies_sent == 1


def test_a_lost_node_is_fatal_only_with_the_others_of_its_group() -> None:
    """Two nodes, m = 2: fatal iff the other one goes within the window too."""
    pair = changed(num_nodes=2, failures_per_node_day=1.0)
    window = pair.detection_s + pair.replacement_s + pair.restart_s + pair.fetch_s
    mean = window / DAY
    assert pair.fatal_share == (pytest.approx(1 - exp(-mean)), 0.0)
    assert changed(replicas=1).fatal_share[0] == pytest.approx(1.0)
    assert changed(failures_per_node_day=0.0).fatal_share == (0.0, 0.0)


def test_more_copies_make_fatal_losses_rarer_without_end() -> None:
    shares = [changed(replicas=m).fatal_share[0] for m in (1, 2, 3, 4, 5)]
    assert all(later < earlier / 10 for earlier, later in itertools.pairwise(shares))
    assert shares[-1] > 0


def test_domains_are_known_to_the_placement() -> None:
    racks = changed(domain_nodes=4, domain_failures_per_day=0.1)
    assert racks.fatal_share[1] == 0.0
    assert changed(domain_nodes=16, domain_failures_per_day=0.1).fatal_share[1] == 1.0
    assert gemini(racks, 3600.0).goodput > gemini(changed(domain_nodes=16, domain_failures_per_day=0.4), 3600.0).goodput


def test_spares_shorten_the_wait() -> None:
    waits = [changed(spares=spares).wait_s(1) for spares in (0, 1, 2, 8)]
    assert waits[0] == JOB.replacement_s
    on_order = JOB.node_rate * JOB.replacement_s
    assert waits[1] == pytest.approx(JOB.replacement_s * (1 - exp(-on_order)))
    assert waits == sorted(waits, reverse=True) and waits[3] < 1e-6
    assert changed(spares=3).wait_s(4) == JOB.replacement_s


def test_policies_come_in_order() -> None:
    nothing, durable, ours = outcomes(JOB)
    assert nothing.goodput < 1e-9 < durable.goodput < ours.goodput < 1
    assert ours.wasted_s is not None and durable.wasted_s is not None and ours.wasted_s < durable.wasted_s / 10


def test_without_failures_only_the_stalls_are_lost() -> None:
    calm = changed(failures_per_node_day=0.0)
    assert no_checkpoints(calm).goodput == 1.0
    assert durable_only(calm, 3600.0).goodput == pytest.approx(3600 / 3675)
    assert gemini(calm, 3600.0).goodput == pytest.approx(3600 / 3601.5)


def test_out_of_range_names_the_attribute() -> None:
    for name, value in (
        ("num_nodes", 0), ("replicas", 17), ("replicas", 0), ("state_bytes", 0.0), ("iteration_s", float("nan")),
        ("network_share", 1.5), ("spares", -1), ("shard_nodes", 5), ("shard_nodes", 32), ("domain_nodes", 0),
        ("domain_failures_per_day", 0.1), ("failures_per_node_day", -0.1), ("durable_interval_s", 0.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: "):
            changed(**{name: value})


# --- advice --------------------------------------------------------------------------------------------


def test_durable_alone_is_at_its_optimum() -> None:
    choice = durable_alone_choice(changed(storage_bytes_per_s=1e12))
    value = durable_only(changed(storage_bytes_per_s=1e12), choice.seconds).goodput
    for factor in (0.7, 0.9, 1.1, 1.4):
        assert durable_only(changed(storage_bytes_per_s=1e12), choice.seconds * factor).goodput < value


def test_the_storage_limits_the_interval() -> None:
    choice = durable_alone_choice(changed(storage_bytes_per_s=2e8))
    assert choice.seconds == 6000 and "one upload takes that long" in choice.reason


def test_rare_fall_backs_do_not_decide_the_interval() -> None:
    choice = durable_choice(changed(replicas=4))
    assert choice.seconds == LONGEST_S and "too rare" in choice.reason
    assert durable_choice(changed(durable_interval_s=1234.0)).seconds == 1234.0


def test_the_fewest_replicas_that_are_as_good() -> None:
    advice = advise(JOB)
    goodput = {choice.replicas: choice.outcome.goodput for choice in advice.choices}
    assert advice.replicas == 2
    assert goodput[2] >= max(goodput.values()) - WORTH > goodput[1]
    assert advise(changed(num_nodes=1, replicas=1, failures_per_node_day=0.01)).replicas == 1
    often = advise(changed(failures_per_node_day=8.0, num_nodes=64))
    assert often.replicas is not None and often.replicas > 2


def test_a_hopeless_job_is_told_so() -> None:
    advice = advise(changed(num_nodes=4096, failures_per_node_day=1.0))
    best = max(choice.outcome.goodput for choice in advice.choices)
    assert best < 0.01 and "goodput stays below 1%" in advice.reason
    assert [c.outcome.goodput for c in advice.choices if c.replicas == advice.replicas] == [best]


def test_host_memory_limits_the_replicas() -> None:
    assert advise(JOB, 375e9).replicas == 2
    small = advise(JOB, 374e9)
    assert small.replicas == 1 and "2 do not fit" in small.reason
    none = advise(JOB, 1e9)
    assert none.replicas is None and "not even one copy fits" in none.reason


# --- played --------------------------------------------------------------------------------------------


def test_monte_carlo_bears_the_formulas_out() -> None:
    checks = monte_carlo(random.Random(7), 4000)
    assert [check.what for check in checks if not check.agrees] == []
    assert any("racks known" in check.what for check in checks) and any("goodput" in check.what for check in checks)


def test_monte_carlo_would_notice_a_wrong_formula() -> None:
    checks = [check for check in monte_carlo(random.Random(7), 4000) if 0.1 < check.formula < 0.99]
    assert len(checks) > 5
    for check in checks:
        wrong = dataclasses.replace(check, formula=check.formula + 0.05)
        assert not wrong.agrees, check.what


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert monte_carlo(random.Random(3), 200) == monte_carlo(random.Random(3), 200)


@pytest.mark.parametrize("values", [
    {"failures_per_node_day": 2.0}, {"process_failures_per_node_day": 2.0, "spares": 2}, {"replicas": 1, "spares": 2},
    {"shard_nodes": 8}, {"domain_nodes": 4, "domain_failures_per_day": 1.0, "spares": 4},
    {"network_bytes_per_s": 1e9}, {"failures_per_node_day": 0.0},
])  # fmt: skip
def test_played_goodput(values: dict[str, float]) -> None:
    job = changed(**values)
    interval = durable_choice(job).seconds
    played = play_gemini(job, interval, 20.0, 60, random.Random(11))
    assert Check("", gemini(job, interval).goodput, played, GOODPUT_TOLERANCE).agrees, (played, gemini(job, interval))


def test_estimates() -> None:
    plan = JOB.placement
    assert draw_losses(plan, 16, 10, random.Random(0)) == Estimate(0.0, 0.0)
    assert draw_losses(plan, 1, 10, random.Random(0)) == Estimate(1.0, 0.0)
    with pytest.raises(ValueError, match="17 of 16"):
        draw_losses(plan, 17, 10, random.Random(0))


class Scripted:
    """A random source that makes failures of single nodes come at given times."""

    def __init__(self, job: Job, failures: list[tuple[float, int]]) -> None:
        self.uniform: list[float] = []
        self.nodes = [node for _, node in failures]
        before = 0.0
        for at, _ in [*failures, (1e12, 0)]:
            # What the player turns into that waiting time, then into "a node".
            self.uniform += [-expm1(-(at - before) * job.rate), 0.0]
            before = at

    def random(self) -> float:
        return min(self.uniform.pop(0), 1 - 1e-16)

    def sample(self, population: object, k: int) -> list[int]:
        return [self.nodes.pop(0) if self.nodes else 0]


@pytest.mark.parametrize(("second", "kept"), [(1, False), (2, True)])
def test_a_second_loss_in_the_window_is_fatal_in_the_same_group(second: int, kept: bool) -> None:
    job = changed(durable_stall_s=0.0, failures_per_node_day=0.1)
    assert job.placement.group_of(0) == (0, 1)
    hour, day = 3600.0, 86400.0
    played = play_gemini(job, 10 * day, 1.0, 1, Scripted(job, [(hour, 0), (hour + 10, second)]))
    load = job.fetch_s if kept else job.upload_s
    back = hour + 10 + job.replacement_s + job.detection_s + job.restart_s + load
    before = (hour - job.transfer_s / job.network_share) // 62 * 62 if kept else 0.0
    assert played.mean == pytest.approx((before + (day - back) // 62 * 62) / day)


def test_after_the_window_the_group_may_lose_the_other() -> None:
    job = changed(durable_stall_s=0.0, failures_per_node_day=0.1)
    played = play_gemini(job, 1e6, 1.0, 1, Scripted(job, [(3600.0, 0), (7200.0, 1)]))
    assert played.mean > 0.97
