"""When replicas may be sent: Algorithm 2 of the paper (section 5.3), its three faults corrected, and what follows.

The printed algorithm subtracts the time of what remains where that of the chunk is meant, partitions m replicas where
m - 1 are sent, and never ends on a span shorter than the start-up cost; `partition` does none of that. Seconds and
bytes throughout; spans are relative to the moment training goes on after an iteration's boundary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

SAFETY = 0.8  #: mu: share of a span that is used; the paper's artifact has the same
MIN_SPAN_SECONDS = 0.005
SUB_BUFFERS = 4  #: p: transfers posted at once; the paper's figure
CHUNK_SECONDS = 0.004  #: a chunk takes about so long: what training's next collective may have to wait for
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 * 2**10, 8 * 2**20
LATE = 1.5  #: an iteration that takes so many times its usual length is none of the profiled ones
_EXACT = 64  #: iterations up to which the interval is found by Algorithm 2 itself
MAX_INTERVAL = 100_000  #: iterations
_BUSY_SHARE = 0.05  #: of the bandwidth: a link that carries less is idle
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
class Link:
    """What a transfer costs: f(s) = startup + s / bandwidth (section 5.3).

    Attributes:
        bandwidth: bytes per second.
        startup: alpha, seconds of each transfer, whatever its size.
    """

    bandwidth: float
    startup: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.startup >= 0):
            raise ValueError(f"a link of {self.bandwidth} bytes/s with {self.startup} s of start-up")

    def seconds(self, size: int) -> float:
        """f(size)."""
        return self.startup + size / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Bytes of one replica to send in one span.

    Attributes:
        span: index into the spans.
        replica: 0 to m - 2: to which of the m - 1 peers.
        size: bytes.
    """

    span: int
    replica: int
    size: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """Result of Algorithm 2.

    Attributes:
        chunks: in the order of sending.
        left: bytes that found no room, over all replicas.
    """

    chunks: tuple[Chunk, ...]
    left: int


def partition(
    spans: Sequence[Span], size: int, sends: int, link: Link, sub_buffer: int, *, safety: float = SAFETY,
    min_span: float = MIN_SPAN_SECONDS,
) -> Partition:  # fmt: skip
    """Algorithm 2: which bytes go in which span.

    Args:
        size: C, bytes of one replica.
        sends: m - 1, replicas that are sent.
        sub_buffer: R / p, bytes of the largest chunk.
        safety: mu, in (0, 1].
        min_span: shorter ones are left alone.

    Raises:
        ValueError: arguments out of range.
    """
    if size < 0 or sends < 0 or sub_buffer < 1 or not 0 < safety <= 1:
        raise ValueError(f"size {size}, sends {sends}, sub-buffer {sub_buffer}, safety {safety}")
    chunks: list[Chunk] = []
    replica, rest = (0, size) if size else (sends, 0)
    for index, span in enumerate(spans):
        room = safety * span.length if span.length >= min_span else 0.0
        while replica < sends:
            fits = sub_buffer if room >= link.seconds(sub_buffer) else int((room - link.startup) * link.bandwidth)
            chunk = min(fits, rest)
            if chunk <= 0:
                break
            chunks.append(Chunk(index, replica, chunk))
            rest -= chunk
            room -= link.seconds(chunk)
            if not rest:
                replica, rest = replica + 1, size
    return Partition(tuple(chunks), rest + (sends - 1 - replica) * size if replica < sends else 0)


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
class TrafficPlan:
    """What `plan_traffic` found.

    Attributes:
        interval: iterations between snapshots.
        chunk: bytes of the largest chunk.
        fits: bytes that one iteration's spans hold.
        left: bytes of each snapshot that are sent outside spans; they cost less than the budget.
        reason: why this interval, for people.
    """

    profile: Profile
    link: Link
    interval: int
    chunk: int
    fits: int
    left: int
    reason: str
    safety: float = SAFETY
    min_span: float = MIN_SPAN_SECONDS


def chunk_bytes(link: Link, size: int) -> int:
    """R / p for a shard of `size` bytes: `CHUNK_SECONDS` of the link, and no more than some thousand in all."""
    wanted = max(int(CHUNK_SECONDS * link.bandwidth), size // 2000)
    return min(max(wanted, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def plan_traffic(
    profile: Profile, size: int, sends: int, link: Link, *, budget: float, interval: int = 1, safety: float = SAFETY,
    min_span: float = MIN_SPAN_SECONDS,
) -> TrafficPlan:  # fmt: skip
    """The shortest interval, of at least `interval` iterations, at which traffic stays within the budget.

    A snapshot has the spans of all iterations until the next one; what they do not hold is taken to stop training
    while it is sent, and may do so for `budget` of that time.

    Args:
        size: bytes of one replica; sends: m - 1.
        budget: share of training's time, such as 0.01.
    """
    chunk = chunk_bytes(link, size)
    total = size * sends

    def left(iterations: int) -> int:
        if iterations > _EXACT:
            return max(0, total - iterations * fits)
        return partition(profile.spans * iterations, size, sends, link, chunk, safety=safety, min_span=min_span).left

    def allowed(iterations: int) -> bool:
        missing = left(iterations)
        return missing == 0 or link.seconds(missing) <= budget * iterations * profile.seconds

    endless = partition(profile.spans, 2**62, 1, link, chunk, safety=safety, min_span=min_span)
    fits = sum(piece.size for piece in endless.chunks)
    low, high = interval - 1, interval  # what is allowed stays so at longer intervals
    while high < MAX_INTERVAL and not allowed(high):
        low, high = high, min(2 * high, MAX_INTERVAL)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if allowed(middle) else (middle, high)
    found, missing = high, left(high)
    room = f"{_mb(total)} to send every {found} iterations of {1e3 * profile.seconds:.0f} ms; the network's idle spans "
    room += f"hold {_mb(fits)} of each at {_mb(int(link.bandwidth))}/s"
    if missing:
        room += f", the rest costs at most {budget:.1%}"
    return TrafficPlan(profile, link, found, chunk, fits, missing, room, safety, min_span)


def delay(plan: TrafficPlan, at: float, backlog: float, size: int) -> float | None:
    """Seconds until a chunk of `size` bytes may be posted: Algorithm 2 as time goes on.

    Args:
        at: seconds since training went on after the last boundary.
        backlog: seconds until what is posted already has been sent.

    Returns:
        0.0 now; None: not in this iteration.
    """
    lead = (SUB_BUFFERS - 1) * plan.link.seconds(plan.chunk)
    if backlog > lead:
        return backlog - lead
    needed = backlog + plan.link.seconds(size)
    for span in plan.profile.spans:
        if span.length < plan.min_span or needed > plan.safety * span.length:
            continue
        if at + needed <= span.start + plan.safety * span.length:
            return max(0.0, span.start - at)
    return None


# --- profile -----------------------------------------------------------------------------------------


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


def _mb(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
