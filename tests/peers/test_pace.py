"""When replicas go: the gate, what a rank learns of its iterations and its link, and the interval all agree on."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gemini_run.peers.gate import Gate
from gemini_run.peers.link import LinkCounter, Sampler, interface_of
from gemini_run.peers.pace import GAP, PROFILE_ITERATIONS, SMALL_BYTES, Pace
from gemini_run.plan.profile import Profile, Span
from gemini_run.plan.schedule import Link, TrafficPlan, plan_traffic
from gemini_run.wire import Interval
from gemini_run.worker.interval import Intervals

SIZE = 16 * SMALL_BYTES
HOUR = Profile(3600.0, (Span(3000.0, 500.0),))  # its idle span never comes in a test


def closed_gate(profile: Profile = HOUR) -> Gate:
    gate = Gate()
    gate.set_plan(plan_traffic(profile, SIZE, 1, Link(1e9, 1e-4), budget=0.01))
    gate.resume(time.perf_counter())
    return gate


def waits(gate: Gate) -> threading.Thread:
    """Someone who waits at the gate, seen to wait."""
    waiting = threading.Thread(target=gate.wait, args=(1,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    return waiting


@pytest.mark.parametrize("opens", ["urge", "close", "no plan"])
def test_the_gate_opens_when_waiting_helps_nobody(opens: str) -> None:
    gate = closed_gate()
    waiting = waits(gate)
    if opens == "no plan":
        gate.set_plan(None)
    else:
        getattr(gate, opens)()
    waiting.join(10)
    assert not waiting.is_alive()
    gate.wait(1)  # and stays open
    gate.resume(time.perf_counter())
    if opens == "urge":
        waits(gate)
        gate.close()
    else:
        gate.wait(1)


def test_the_gate_opens_in_an_idle_span_and_in_an_iteration_that_does_not_end() -> None:
    closed_gate(Profile(3600.0, (Span(0.0, 3600.0),))).wait(1)
    gate = closed_gate()
    gate.resume(time.perf_counter() - 2 * HOUR.seconds)
    gate.wait(1)


class Training:
    """Iterations of 0.1 s on a clock of its own, over a link that training fills for the first 30 ms of each.

    `link`: bytes per second; replicas of SIZE bytes go to one peer.
    """

    def __init__(self, link: float, *, budget: float | None = 0.01, busy: float = 0.03, seen: bool = True) -> None:
        self.now = 1000.0
        self.link, self.busy, self.seconds = link, busy, 0.1
        self.events: list[dict[str, Any]] = []
        self._stream: list[tuple[float, int]] = []
        sampler: Any = self if seen else None
        self.pace = Pace(
            budget=budget, interval=1, sampler=sampler, listener=lambda name, fields: self.events.append(fields)
        )
        self.pace.started_up(1e-4)
        self.done = 0

    def start(self, period: float) -> None:
        steps = [i * self.seconds / 50 for i in range(51)]
        self._stream = [(self.now + at, int(self.link * min(at, self.busy))) for at in steps]

    def stop(self) -> list[tuple[float, int]]:
        stream, self._stream = self._stream, []
        return stream

    def iteration(self, *, snapshot: bool) -> None:
        self.pace.resume(self.now, quiet=not snapshot)
        if snapshot:
            chunk = 2**20
            self.pace.arrived([(self.now + i * chunk / self.link, chunk) for i in range(SIZE // chunk)])
            self.pace.sent(SIZE, 1)
        self.now += self.seconds
        self.pace.boundary(self.now)
        self.done += 1

    def until_planned(self) -> TrafficPlan:
        while self.pace.plan is None:
            assert self.done < 10 * GAP
            self.iteration(snapshot=self.done % self.pace.wish.iterations == 0)
        return self.pace.plan


def test_a_fast_link_is_left_alone() -> None:
    training = Training(link=1e11)
    for _ in range(30):
        training.iteration(snapshot=True)
    assert training.pace.plan is None and training.pace.wish.iterations == 1 and training.pace.chunk_bytes is None


def test_without_a_budget_nothing_is_held_back() -> None:
    training = Training(link=1e7, budget=None)
    for _ in range(30):
        training.iteration(snapshot=True)
    assert training.pace.plan is None and training.pace.wish.iterations == 1 and training.events == []


@pytest.mark.parametrize(
    ("link", "busy", "interval"),
    [
        (1e9, 0.03, 1),  # 17 ms for a replica, 70 ms idle
        (1e8, 0.03, 4),  # 168 ms for a replica, 0.8 * 70 ms usable in each iteration, less the start-up costs
        (1e8, 0.1, 168),  # never idle: 1 % of the time
    ],
)
def test_the_interval_is_what_the_idle_spans_hold(link: float, busy: float, interval: int) -> None:
    training = Training(link, busy=busy)
    plan = training.until_planned()
    assert abs(training.pace.wish.iterations - interval) <= 0.05 * interval
    assert training.pace.wish.iterations == plan.interval and not training.pace.wish.passing
    assert training.events[0]["reason"] == training.pace.wish.reason
    if busy < training.seconds:
        [span] = plan.profile.spans
        assert span.start == pytest.approx(busy, abs=0.004) and span.start + span.length == pytest.approx(0.1)
    assert training.done >= PROFILE_ITERATIONS


def test_where_nothing_can_be_seen_of_the_link_no_time_counts_as_idle() -> None:
    plan = Training(1e9, seen=False).until_planned()
    assert plan.profile.spans == () and plan.spacing > 0 and plan.interval == 17


def test_iterations_of_another_length_are_profiled_again() -> None:
    training = Training(1e8)
    first = training.until_planned()
    training.seconds = 0.4
    while training.pace.plan is first:
        training.iteration(snapshot=training.done % first.interval == 0)
        assert training.done < 200
    assert training.pace.plan is None and training.pace.wish.passing and "they took 100 ms" in training.pace.wish.reason
    assert training.until_planned().interval == 1, "0.8 * 370 ms hold it"


def test_an_evaluation_now_and_then_is_no_other_shape() -> None:
    training = Training(1e8)
    plan = training.until_planned()
    for number in range(200):
        training.seconds = 1.0 if number % 50 == 0 else 0.1
        training.iteration(snapshot=number % plan.interval == 0)
    assert training.pace.plan is plan


def test_training_that_waits_for_commits_makes_the_interval_longer() -> None:
    training = Training(1e8)
    before = training.until_planned().interval
    for _ in range(16):
        training.iteration(snapshot=True)
        training.pace.waited(0.02)
    assert training.pace.wish.iterations > before and "training waited 20 ms" in training.pace.wish.reason


# --- the link ---------------------------------------------------------------------------------------------


def test_the_kernels_counters_see_what_the_interface_carries() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") is None
    counter = LinkCounter("lo", Path("/nonexistent"))
    before = counter.read()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taker, socket.socket(type=socket.SOCK_DGRAM) as giver:
        taker.bind(("127.0.0.1", 0))
        for _ in range(50):
            giver.sendto(bytes(10_000), taker.getsockname())
    assert counter.read() - before >= 2 * 500_000, "sent and received"
    counter.close()
    with pytest.raises(OSError, match="no byte counters of the interface 'nothing0'"):
        LinkCounter("nothing0")


def test_rdma_devices_on_the_same_wire_count(tmp_path: Path) -> None:
    def port(device: str, counters: dict[str, int], interface: str | None) -> Path:
        for name, value in counters.items():
            file = tmp_path / device / "ports" / "1" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        if interface is not None:
            (tmp_path / device / "device" / "net" / interface).mkdir(parents=True)
        return tmp_path / device / "ports" / "1"

    ours = port("mlx0", {"counters/port_xmit_data": 1, "counters/port_rcv_data": 2}, "lo")
    port("mlx1", {"counters/port_xmit_data": 10**12}, "eth9")
    efa = port("efa0", {"hw_counters/tx_bytes": 5, "hw_counters/rx_bytes": 6}, None)
    counter = LinkCounter("lo", tmp_path)
    before = counter.read()
    (ours / "counters/port_xmit_data").write_text(f"{10**9}\n")
    (efa / "hw_counters/rx_bytes").write_text(f"{10**10}\n")
    grown = counter.read() - before
    assert 0 <= grown - (4 * (10**9 - 1) + 10**10 - 6) < 10**8, "words of four bytes, and bytes"
    counter.close()


def test_a_sampler_reads_between_start_and_stop() -> None:
    numbers = iter(range(10**6))
    sampler = Sampler(lambda: next(numbers))
    assert sampler.stop() == []
    sampler.start(0.001)
    time.sleep(0.1)
    samples = sampler.stop()
    assert len(samples) > 3 and samples == sorted(samples)
    time.sleep(0.02)
    assert sampler.stop() == [] and len(samples) in (len(samples), len(samples) + 1)


# --- one interval for all ---------------------------------------------------------------------------------


def test_the_longest_interval_that_any_rank_needs_is_in_force_and_whoever_asked_may_lower_it() -> None:
    store = dist.HashStore()
    needs = [Interval(1, ""), Interval(1, ""), Interval(1, "")]
    changes: list[Interval] = []
    ranks = [
        Intervals(rank, 1, need=lambda rank=rank: needs[rank], on_change=changes.append)  # type: ignore[misc]
        for rank in range(3)
    ]
    ranks[0].open(store)

    def commit() -> int:
        in_force = changes[-1].iterations if changes else 1
        for rank in ranks:
            rank.ask(in_force, store)
        return ranks[0].decide(store)

    assert commit() == 1 and changes == []
    needs[1] = Interval(5, "slow link")
    assert commit() == 5 and changes == [Interval(5, "slow link", rank=1)]
    needs[2] = Interval(3, "also slow")
    assert commit() == 5
    needs[1] = Interval(1, "fast again")
    assert [commit(), commit()][-1] == 3, "the second longest, at the latest one commit later"
    needs[2] = Interval(1, "fast again")
    assert [commit(), commit()][-1] == 1
