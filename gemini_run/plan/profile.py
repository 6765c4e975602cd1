"""The average iteration: when training leaves the network idle (section 5.3 of the paper). Seconds and bytes.

Spans are relative to the moment training goes on after an iteration's boundary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

_BUSY_SHARE = 0.05  #: of the bandwidth: a link that carries less is idle
_LONGEST = 1.5  #: times the usual: what an iteration counts for at most
_RARE = 8  #: one of so many is few
_BINS = 200  #: of an iteration's timeline


@dataclasses.dataclass(frozen=True)
class Span:
    """An idle span of the network.

    Attributes:
        start, length: seconds.
    """

    start: float
    length: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """An average iteration without checkpoint traffic.

    Attributes:
        seconds: its length, from one boundary to the next.
        spans: when training leaves the network idle.
    """

    seconds: float
    spans: tuple[Span, ...]

    @property
    def idle_seconds(self) -> float:
        return sum(span.length for span in self.spans)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One iteration as it was watched.

    Attributes:
        seconds: its length.
        samples: (seconds since it began, bytes that the link has carried since any fixed moment), rising.
    """

    seconds: float
    samples: tuple[tuple[float, int], ...]


def average(timelines: Sequence[Timeline], bandwidth: float) -> Profile:
    """Idle spans of the median iteration: where, in most of them, the link carried next to nothing.

    Args:
        timelines: at least one.
        bandwidth: bytes per second that the link can carry.
    """
    seconds = statistics.median(line.seconds for line in timelines)
    width = seconds / _BINS
    carried = [_bins(line, width) for line in timelines]
    idle = [statistics.median(column) <= _BUSY_SHARE * bandwidth * width for column in zip(*carried, strict=True)]
    spans, at = [], 0
    for is_idle, run in itertools.groupby(idle):
        count = len(list(run))
        if is_idle:
            spans.append(Span(at * width, count * width))
        at += count
    return Profile(seconds, tuple(spans))


def _bins(line: Timeline, width: float) -> list[float]:
    """Bytes in each bin; between two samples they are taken to flow evenly."""
    found = [0.0] * _BINS
    for (start, before), (end, after) in itertools.pairwise(line.samples):
        if after <= before or end <= start:
            continue
        first, last = int(start / width), min(int(end / width), _BINS - 1)
        for index in range(first, last + 1):
            overlap = min(end, (index + 1) * width) - max(start, index * width)
            found[index] += max(0.0, overlap) / (end - start) * (after - before)
    return found


def changed(usual: float, lengths: Sequence[float], tolerance: float = 0.25) -> bool:
    """Whether iterations of late (their lengths, seconds) are no longer those of a profile."""
    return bool(lengths) and not math.isclose(statistics.median(lengths), usual, rel_tol=tolerance)


def slower(loaded: Sequence[float], alone: Sequence[float]) -> float:
    """By which share iterations with replica traffic are longer than those without, beyond what may be chance.

    Args:
        loaded: seconds of iterations with traffic in some of them. Few much longer ones are left out, as an evaluation
            now and then; of more each counts for so much only.
        alone: seconds of iterations without traffic. Neither may be empty.
    """
    usual = statistics.median(alone)
    noise = 2 * statistics.median(abs(length - usual) for length in alone)
    ordered = sorted(loaded)
    rare = sum(length > _LONGEST * usual for length in ordered[len(ordered) - len(ordered) // _RARE :])
    mean = statistics.mean(min(length, _LONGEST * usual) for length in ordered[: len(ordered) - rare])
    return max(0.0, mean - usual - noise) / usual
