"""The gate that each chunk of a replica passes: open in the network's idle spans, and whenever waiting helps nobody.

It holds a chunk back for less than an iteration and a half. It stands open while the training thread waits for the
commit, when an iteration takes much longer than it did while profiled (evaluation, a peer in trouble), and once closed.
"""

from __future__ import annotations

import threading
import time

from gemini_run.plan.schedule import LATE, TrafficPlan, delay


class Gate:
    """Thread-safe. The training thread tells it of boundaries, the commit thread asks it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._plan: TrafficPlan | None = None
        self._resumed = 0.0  # when training went on after the last boundary
        self._urgent = self._closed = False
        self._sent_by = 0.0  # when what was posted will have been sent, at the link's speed

    def set_plan(self, plan: TrafficPlan | None) -> None:
        """None: everything may go at once."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def resume(self, now: float) -> None:
        """Training goes on after a boundary. `now`: of time.perf_counter()."""
        with self._changed:
            self._resumed, self._urgent = now, False
            self._changed.notify_all()

    def urge(self) -> None:
        """Training waits for the commit: open until `resume`."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    def close(self) -> None:
        """Training is over: open from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, size: int) -> None:
        """Block until a chunk of `size` bytes may be posted."""
        with self._changed:
            while (plan := self._plan) is not None and not (self._urgent or self._closed):
                now = time.perf_counter()
                at = now - self._resumed
                if at > LATE * plan.profile.seconds:
                    return
                pause = delay(plan, at, max(0.0, self._sent_by - now), size)
                if pause == 0.0:
                    self._sent_by = max(now, self._sent_by) + (plan.spacing or plan.link.seconds(size))
                    return
                rest = LATE * plan.profile.seconds - at
                self._changed.wait(rest if pause is None else min(pause, rest))
