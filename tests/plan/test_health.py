from __future__ import annotations

import dataclasses

import pytest

from gemini_run.plan.health import (
    EVERYONE,
    HEARTBEAT_SECONDS,
    RING_WATCHES,
    SILENCE_SECONDS,
    STALL_SECONDS,
    Observation,
    awake_since,
    patience,
    verdict,
    watch_targets,
)


@pytest.mark.parametrize("n", range(1, EVERYONE + 1))
def test_in_a_small_job_all_watch_all(n: int) -> None:
    for node in range(n):
        assert set(watch_targets(node, n)) == set(range(n)) - {node}


@pytest.mark.parametrize("n", range(EVERYONE + 1, EVERYONE + 8))
def test_in_a_large_job_each_node_is_watched_by_three(n: int) -> None:
    watched = [target for node in range(n) for target in watch_targets(node, n)]
    assert all(watched.count(node) == RING_WATCHES for node in range(n))
    assert all(node not in watch_targets(node, n) for node in range(n))


HEARD = Observation(last_heard=100.0)


@pytest.mark.parametrize(
    ("change", "now", "lost"),
    [
        ({}, 100.0, None),
        ({}, 100.0 + SILENCE_SECONDS, None),
        ({}, 100.0 + SILENCE_SECONDS + 0.01, "silent"),
        ({"stream_ended": True}, 101.0, None),  # it may be reachable again
        ({"stream_ended": True}, 103.0, "silent"),
        ({"stream_ended": True, "refused": True}, 100.0, "refused"),
        ({"refused": True}, 100.0, None),  # the stream is open: a second connection proves nothing
        ({"left": True}, 100.0, "stopped"),
    ],
)
def test_verdict(change: dict[str, bool], now: float, lost: str | None) -> None:
    said = verdict(dataclasses.replace(HEARD, **change), now)
    assert (said is None) if lost is None else (said is not None and lost in said)


def test_a_frozen_node_is_lost_within_three_seconds_but_not_over_a_late_heartbeat() -> None:
    assert HEARTBEAT_SECONDS * 4 < SILENCE_SECONDS < 3.0


def test_patience_runs_out_when_the_verdict_comes() -> None:
    assert patience(HEARD, 100.0) == SILENCE_SECONDS
    assert patience(HEARD, 101.0) == SILENCE_SECONDS - 1
    assert patience(HEARD, 200.0) == 0.0


def test_who_was_frozen_itself_has_been_listening_only_since_then() -> None:
    assert awake_since(10.0, 50.0, 50.0 + STALL_SECONDS) == 10.0
    assert awake_since(10.0, 50.0, 58.0) == 58.0
