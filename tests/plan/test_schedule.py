"""Algorithm 2 by hand, its laws on random spans, and the interval that follows."""

from __future__ import annotations

import random

import pytest

from gemini_run.plan.profile import Profile, Span, Timeline, average, changed, slower
from gemini_run.plan.schedule import SUB_BUFFERS, Chunk, Link, delay, partition, plan_traffic

LINK = Link(bandwidth=1024.0, startup=0.125)


def test_by_hand() -> None:
    # f(128) = 0.25 s. At mu = 0.5 the spans have 0.625 s: two chunks, and what is left is the start-up cost alone;
    # 0.5 s: the last 96 bytes of replica 0 (0.21875 s), one chunk of replica 1, 0.03125 s left;
    # 0.4375 s: a chunk, then (0.1875 - 0.125) * 1024 = 64 bytes.
    found = partition([Span(0, 1.25), Span(2, 1.0), Span(4, 0.875)], 352, 2, LINK, 128, safety=0.5, min_span=0)
    first, second = [Chunk(0, 0, 128)] * 2 + [Chunk(1, 0, 96)], [Chunk(1, 1, 128), Chunk(2, 1, 128), Chunk(2, 1, 64)]
    assert list(found.chunks) == first + second
    assert found.left == 704 - 672


def test_m_minus_1_replicas_are_sent_one_after_the_other() -> None:
    found = partition([Span(0, 100.0)], 250, 2, LINK, 100, min_span=0)
    assert [(c.replica, c.size) for c in found.chunks] == [(0, 100), (0, 100), (0, 50), (1, 100), (1, 100), (1, 50)]
    assert found.left == 0
    assert partition([Span(0, 100.0)], 250, 0, LINK, 100).chunks == ()


def test_short_spans_end_and_are_left_alone() -> None:
    assert partition([Span(0, 0.15625)], 10**6, 1, LINK, 100, safety=0.8, min_span=0).left == 10**6  # 0.125 s = alpha
    assert partition([Span(0, 0.9)], 10, 1, LINK, 100, min_span=1.0).left == 10


@pytest.mark.parametrize("seed", range(60))
def test_every_byte_once_and_none_beyond_a_spans_safe_length(seed: int) -> None:
    rng = random.Random(seed)
    spans = [Span(float(i), rng.choice([0.0, rng.random(), 5 * rng.random()])) for i in range(rng.randrange(0, 12))]
    link = Link(10 ** rng.uniform(1, 5), rng.choice([0.0, rng.random() * 0.2]))
    size, sends, sub = rng.randrange(0, 5000), rng.randrange(0, 4), rng.randrange(1, 600)
    mu, shortest = rng.uniform(0.3, 1.0), rng.choice([0.0, 0.3])
    found = partition(spans, size, sends, link, sub, safety=mu, min_span=shortest)
    assert found == partition(spans, size, sends, link, sub, safety=mu, min_span=shortest)
    assert sum(c.size for c in found.chunks) + found.left == size * sends
    assert all(0 < c.size <= sub for c in found.chunks)
    assert [c.span for c in found.chunks] == sorted(c.span for c in found.chunks)
    sent = [sum(c.size for c in found.chunks if c.replica == replica) for replica in range(sends)]
    assert sent == sorted(sent, reverse=True) and sum(0 < count < size for count in sent) <= 1
    for index, span in enumerate(spans):
        used = [link.seconds(c.size) for c in found.chunks if c.span == index]
        assert sum(used) <= mu * span.length + 1e-9
        assert not used or span.length >= shortest
    if found.left:  # then no span has room for one more byte
        for index, span in enumerate(spans):
            used = sum(link.seconds(c.size) for c in found.chunks if c.span == index)
            assert span.length < shortest or used + link.seconds(2) > mu * span.length - 1e-9


def profile(idle: float, seconds: float = 1.0) -> Profile:
    return Profile(seconds, (Span(0.0, idle),) if idle else ())


MBIT_1000 = Link(125e6, 0.0)


def test_what_fits_is_sent_every_iteration() -> None:
    plan = plan_traffic(profile(0.5), 40_000_000, 1, MBIT_1000, budget=0.01)
    assert (plan.interval, plan.left) == (1, 0)
    assert plan.fits == pytest.approx(0.8 * 0.5 * 125e6, rel=1e-6)


def test_the_interval_grows_until_the_rest_is_within_the_budget() -> None:
    # 50 MB fit an iteration; 1 % of it is worth 1.25 MB. 150 MB need three, 153 MB just so, 155 MB four.
    found = {size: plan_traffic(profile(0.5), size * 10**6, 1, MBIT_1000, budget=0.01) for size in (150, 153, 155)}
    assert [plan.interval for plan in found.values()] == [3, 3, 4]
    assert found[153].left == pytest.approx(3e6, rel=0.01)
    assert "155 MB to send every 4 iterations" in found[155].reason
    assert "the rest costs at most 1.0%" in found[153].reason
    assert plan_traffic(profile(0.5), 74_000_000, 2, MBIT_1000, budget=0.0).interval == 3
    assert plan_traffic(profile(0.5), 1000, 1, MBIT_1000, budget=0.01, interval=7).interval == 7


def test_without_idle_spans_the_budget_alone_decides() -> None:
    # 12.5 MB take 0.1 s: 1 % of ten iterations of a second.
    plan = plan_traffic(profile(0.0), 12_500_000, 1, MBIT_1000, budget=0.01)
    assert (plan.interval, plan.left, plan.fits) == (10, 12_500_000, 0)


def test_nothing_is_posted_outside_a_spans_safe_part() -> None:
    plan = plan_traffic(Profile(1.0, (Span(0.1, 0.2), Span(0.6, 0.3))), 10**8, 1, MBIT_1000, budget=0.01)
    chunk = plan.link.seconds(plan.chunk)
    assert delay(plan, 0.0, 0.0, plan.chunk) == pytest.approx(0.1)
    assert delay(plan, 0.15, 0.0, plan.chunk) == 0.0
    assert delay(plan, 0.26 - chunk, 0.0, plan.chunk) == 0.0  # 0.1 + 0.8 * 0.2
    assert delay(plan, 0.26 - chunk / 2, 0.0, plan.chunk) == pytest.approx(0.34 + chunk / 2)
    assert delay(plan, 0.85, 0.0, plan.chunk) is None
    # Paced at the link's speed: what is posted already is waited for, down to p - 1 chunks.
    assert delay(plan, 0.15, (SUB_BUFFERS - 1) * chunk + 0.01, plan.chunk) == pytest.approx(0.01)


def test_idle_spans_are_those_of_most_iterations() -> None:
    def watched(seconds: float, busy: tuple[float, float]) -> Timeline:
        times = [seconds * i / 100 for i in range(101)]
        start, end = busy
        carried = [int(1e6 * max(0.0, min(t, end) - start)) for t in times]
        return Timeline(seconds, tuple(zip(times, carried, strict=True)))

    lines = [watched(1.0, (0.4, 0.7))] * 4 + [watched(2.0, (0.0, 2.0))]
    found = average(lines, bandwidth=1e6)
    assert found.seconds == 1.0
    before, after = found.spans
    assert (before.start, before.length) == (0.0, pytest.approx(0.4, abs=0.011))
    assert (after.start, after.length) == (pytest.approx(0.7, abs=0.011), pytest.approx(0.3, abs=0.011))
    assert found.idle_seconds == pytest.approx(0.7, abs=0.03)
    assert average([Timeline(1.0, ((0.0, 5), (1.0, 5)))], 1e6).spans == (Span(0.0, 1.0),)


def test_an_iteration_of_another_length_is_another_shape() -> None:
    assert not changed(1.0, [1.1, 0.9, 5.0])
    assert changed(1.0, [1.5, 1.4, 0.9])
    assert not changed(1.0, [])


def test_what_traffic_costs_is_what_is_beyond_chance_and_evaluations() -> None:
    alone = [1.0, 1.0, 1.01, 0.99]
    assert slower([1.0] * 16, alone) == 0.0
    assert slower([1.1] * 16, alone) == pytest.approx(0.09)
    assert slower([1.0] * 15 + [20.0], alone) == 0.0, "an evaluation"
    assert slower([1.0] * 8 + [20.0] * 8, alone) > 0.1, "so many are none"
    assert slower([20.0], alone) >= 0.0
