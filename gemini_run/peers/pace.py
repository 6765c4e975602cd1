"""Replica traffic that yields to training: measures the link and the training, then plans and gates.

1. *watching*: replicas are sent at once. A rank whose traffic would cost more than the budget if training stood still
   for it goes on to
2. *profiling*: it asks for a longer snapshot interval for once, and watches the link in iterations without traffic of
   ours. Enough of them make the average iteration, and `plan.schedule` the plan:
3. *scheduled*: chunks go in the idle spans only, and the interval is one that the plan allows. Iterations of another
   length send it back to 2, each time later than the last.

Whatever the plan says: where training waits for commits longer than the budget, or iterations turn out longer than
those without traffic, the interval grows.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from gemini_run.peers.gate import Gate
from gemini_run.peers.link import Sampler
from gemini_run.plan.profile import Profile, Timeline, average, changed, slower
from gemini_run.plan.schedule import SUB_BUFFERS, Link, TrafficPlan, plan_traffic
from gemini_run.wire import Interval

PROFILE_ITERATIONS = 6  #: watched without traffic before a plan is made
GAP = PROFILE_ITERATIONS + 4  #: iterations between two snapshots while profiling
SMALL_BYTES = 2**20  #: what is less goes at once
_WAITS = 8  #: for commits that are looked at
_FEWEST, _MOST = 16, 64  #: lengths of iterations that are looked at
_FIRST_LENGTHS = 3
_RATE_WINDOW_SECONDS = 0.05
_FEWEST_SAMPLES = 10  #: of an iteration that was watched well enough
_LONGEST_GAP = 1000
_FIRST_REPROFILE = 20  #: iterations after a plan until it may be given up; doubled every time
_NOTICEABLE = 0.002  #: share of an iteration: with a smaller budget than that measuring has no sense
_AS_ASKED = "as asked for"

Listener = Callable[[str, dict[str, Any]], None]


class Pace:
    """One rank's. The training thread calls `boundary`, `urge`, `waited`, `resume` and `close`; the commit thread the
    rest.

    Attributes:
        gate: for the chunks.
        plan: once there is one.
    """

    def __init__(
        self, *, budget: float | None, interval: int, sampler: Sampler | None, listener: Listener,
        sub_buffers: int = SUB_BUFFERS,
    ) -> None:  # fmt: skip
        """
        Args:
            budget: share of training's time that traffic may cost; None: everything is sent at once.
            interval: snapshots are never taken more often.
            sampler: of the link that replicas take, None if it has no counter: then nothing is known of idle spans.
            listener: called with the name of an event and its fields.
            sub_buffers: p of Algorithm 2.
        """
        self.gate = Gate()
        self.plan: TrafficPlan | None = None
        self._budget = budget
        self._interval = interval
        self._listener = listener
        self._sub_buffers = sub_buffers
        self._lock = threading.Lock()
        self._state: Literal["watching", "profiling", "scheduled"] = "watching"
        self._wish = Interval(interval, _AS_ASKED)
        self._sampler = sampler
        self._timelines: list[Timeline] = []
        self._quiet = False  # nothing of ours is on the link in this iteration
        self._gaps = 0  # snapshots since profiling began
        self._resumed = 0.0
        self._lengths: deque[float] = deque(maxlen=_MOST)
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._alone: list[float] = []  # lengths of iterations when they were last watched
        self._loaded: tuple[list[float], int] | None = None  # lengths when scheduled, and the interval, until then
        self._least = interval  # what measured harm asks for, whatever the plan says
        self._harm = ""
        self._since_plan = 0
        self._reprofile_after = _FIRST_REPROFILE
        self._startup: float | None = None
        self._rates: deque[float] = deque(maxlen=64)
        self._size = self._sends = 0

    @property
    def wish(self) -> Interval:
        """What this rank needs now."""
        return self._wish if self._budget is not None else Interval(self._interval, _AS_ASKED)

    @property
    def replica_bytes(self) -> int:
        """Bytes that go to each peer with a snapshot, as last seen."""
        return self._size

    # --- training thread ----------------------------------------------------------------------------

    def boundary(self, now: float) -> None:
        """An iteration ends (time.perf_counter())."""
        if self._budget is None or not self._resumed:
            return
        with self._lock:
            length = now - self._resumed
            self._lengths.append(length)
            self._since_plan += 1
            if self._state == "profiling":
                self._watched(length)
            elif self._state == "scheduled":
                self._check_shape()

    def urge(self) -> None:
        """Training is about to wait for the commit."""
        self.gate.urge()

    def waited(self, seconds: float) -> None:
        """A snapshot was due, and training waited so long for the commit of the one before."""
        if self._budget is None:
            return
        with self._lock:
            self._waits.append(seconds)
            wish = self._wish
            if self._state != "scheduled" or len(self._waits) < _WAITS or not self._lengths:
                return
            usual, wait = statistics.median(self._lengths), statistics.median(self._waits)
            if wait > max(self._budget, _NOTICEABLE) * wish.iterations * usual:
                self._waits.clear()
                self._least = wish.iterations + max(1, wish.iterations // 4)
                self._harm = f"training waited {1e3 * wait:.0f} ms for each snapshot's replicas"
                self._wish = Interval(self._least, self._harm)

    def resume(self, now: float, *, quiet: bool) -> None:
        """Training goes on. `quiet`: all snapshots so far are committed, so no rank sends anything."""
        with self._lock:
            self._resumed, self._quiet = now, quiet
            if self._sampler is not None and self._state == "profiling" and quiet and self._lengths:
                self._sampler.start(min(max(0.002, statistics.median(self._lengths) / 400), 0.02))
        self.gate.resume(now)

    def close(self) -> None:
        """Training is over, or broken: nothing is held back any more."""
        self.gate.close()

    # --- commit thread ------------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """Transfers to have posted at once."""
        return self._sub_buffers

    @property
    def chunk_bytes(self) -> int | None:
        """Of the chunks of this rank that wait at the gate; None: nothing does."""
        return self.plan.chunk if self._budget is not None and self.plan is not None else None

    def started_up(self, seconds: float) -> None:
        """What a transfer of next to nothing takes."""
        self._startup = seconds

    def arrived(self, times: list[tuple[float, int]]) -> None:
        """When each chunk of a transfer that nobody held back was here, and its bytes."""
        start, count = 0, 0
        for index in range(1, len(times)):
            count += times[index][1]
            took = times[index][0] - times[start][0]
            if took >= _RATE_WINDOW_SECONDS or (took > 0 and index == len(times) - 1 and start == 0):
                self._rates.append(count / took)
                start, count = index, 0

    def sent(self, size: int, sends: int) -> None:
        """The transfer is over: `size` bytes to each of `sends` peers."""
        with self._lock:
            if self._budget is None:
                return
            if self._state == "watching":
                self._size, self._sends = size, sends
                if self._worth_it():
                    self._profile("replicas sent at once would cost more than the budget")
            elif self._state == "profiling":
                self._size, self._sends = max(size, self._size), sends
                self._gaps += 1
                if self._gaps >= 3:  # the transfers leave no iteration alone: longer gaps
                    self._gaps = 0
                    longer = min(2 * self._wish.iterations, _LONGEST_GAP)
                    self._wish = Interval(longer, self._wish.reason, passing=True)
            elif size >= SMALL_BYTES:
                moved = abs(size - self._size) > 0.1 * self._size
                self._size, self._sends = size, sends
                if moved and self.plan is not None:
                    self._adopt(self.plan.profile, self.plan.link)

    # --- decisions, under the lock ------------------------------------------------------------------

    def _link(self) -> Link | None:
        if not self._rates or self._startup is None:
            return None
        ordered = sorted(self._rates)  # upper quartile: training's own traffic only makes it seem slower
        return Link(ordered[(3 * len(ordered)) // 4], self._startup)

    def _worth_it(self) -> bool:
        link = self._link()
        if link is None or self._budget is None or self._size < SMALL_BYTES or len(self._lengths) < _FIRST_LENGTHS:
            return False
        usual = statistics.median(self._lengths)
        return self._sends * link.seconds(self._size) > self._budget * self._interval * usual

    def _profile(self, reason: str) -> None:
        self._state = "profiling"
        self.plan = None
        self._timelines, self._quiet, self._gaps = [], False, 0
        self.gate.set_plan(None)
        reason = f"{PROFILE_ITERATIONS} iterations are watched without replicas: {reason}"
        self._wish = Interval(max(self._interval, GAP, self._least), reason, passing=True)

    def _watched(self, length: float) -> None:
        samples = self._sampler.stop() if self._sampler is not None else []
        if not self._quiet:
            return
        times = tuple((at - self._resumed, count) for at, count in samples if at >= self._resumed)
        self._timelines.append(Timeline(length, times))
        link = self._link()
        if len(self._timelines) < PROFILE_ITERATIONS or link is None:
            return
        seen = [line for line in self._timelines if len(line.samples) >= _FEWEST_SAMPLES]
        enough = 2 * len(seen) > PROFILE_ITERATIONS
        found = average(seen if enough else self._timelines, link.bandwidth)
        self._learn_harm()
        self._adopt(found if enough else Profile(found.seconds, ()), link)  # unseen is not idle

    def _learn_harm(self) -> None:
        """Compare the iterations that were scheduled with those that have just been watched without traffic."""
        before, self._alone = self._alone, [line.seconds for line in self._timelines]
        if before and changed(statistics.median(before), self._alone):
            self._least, self._harm = self._interval, ""  # another iteration: what was learnt is void
        if self._loaded is None or self._budget is None:
            return
        (lengths, interval), self._loaded = self._loaded, None
        harm, budget = slower(lengths, self._alone), max(self._budget, _NOTICEABLE)
        if harm > budget:
            self._least = min(max(math.ceil(interval * harm / budget), interval + 1), 4 * interval)
            self._harm = f"iterations were {harm:.1%} longer with replicas every {interval}"

    def _adopt(self, profile: Profile, link: Link) -> None:
        assert self._budget is not None, "else nothing is planned"
        plan = plan_traffic(
            profile, self._size, self._sends, link, budget=self._budget, interval=max(self._interval, self._least),
            sub_buffers=self._sub_buffers,
        )  # fmt: skip
        self._state, self.plan, self._since_plan = "scheduled", plan, 0
        self._waits.clear()
        self._lengths.clear()
        harmed = self._harm and plan.interval == self._least
        self._wish = Interval(plan.interval, f"{self._harm}; {plan.reason}" if harmed else plan.reason)
        self.gate.set_plan(plan)
        fields = {
            "interval": plan.interval, "iteration_ms": round(1e3 * profile.seconds, 3),
            "spans_ms": [[round(1e3 * s.start, 3), round(1e3 * s.length, 3)] for s in profile.spans[:50]],
            "bytes": self._size, "sends": self._sends, "bytes_per_s": round(link.bandwidth),
            "startup_ms": round(1e3 * link.startup, 3), "chunk": plan.chunk, "reason": plan.reason,
        }  # fmt: skip
        self._listener("traffic_scheduled", fields)

    def _check_shape(self) -> None:
        plan = self.plan
        if plan is None or self._since_plan < self._reprofile_after:
            return
        # No fewer than a whole interval's: the chunks are all in its first iterations.
        count = min(max(_FEWEST, self._wish.iterations), _MOST)
        if len(self._lengths) < count:
            return
        lengths = list(self._lengths)[-count:]
        harm = slower(lengths, self._alone)
        if changed(plan.profile.seconds, lengths) or harm > max(self._budget or 0.0, _NOTICEABLE):
            self._reprofile_after *= 2
            self._rates.clear()
            self._loaded = lengths, self._wish.iterations
            now, was = 1e3 * statistics.mean(lengths), 1e3 * plan.profile.seconds
            self._profile(f"they take {now:.0f} ms, they took {was:.0f} ms")
