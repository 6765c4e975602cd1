"""When replicas may be sent: Algorithm 2 of the paper (section 5.3), its three faults corrected, and what follows.

The printed algorithm subtracts the time of what remains where that of the chunk is meant, partitions m replicas where
m - 1 are sent, and never ends on a span shorter than the start-up cost; `partition` does none of that. Seconds and
bytes throughout; spans are relative to the moment training goes on after an iteration's boundary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gemini_run.plan.profile import Profile, Span

SAFETY = 0.8  #: mu: share of a span that is used; the paper's artifact has the same
MIN_SPAN_SECONDS = 0.005
SUB_BUFFERS = 4  #: p: transfers posted at once; the paper's figure
CHUNK_SECONDS = 0.004  #: a chunk takes about so long: what training's next collective may have to wait for
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 * 2**10, 8 * 2**20
LATE = 1.5  #: an iteration that takes so many times its usual length is none of the profiled ones
_EXACT = 64  #: iterations up to which the interval is found by Algorithm 2 itself
MAX_INTERVAL = 100_000  #: iterations


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
class TrafficPlan:
    """What `plan_traffic` found.

    Attributes:
        interval: iterations between snapshots.
        chunk: bytes of the largest chunk.
        fits: bytes that one iteration's spans hold.
        left: bytes of each snapshot that are sent outside spans; they cost less than the budget.
        reason: why this interval, for people.
        sub_buffers: p, transfers posted at once.
        spacing: seconds from one chunk to the next where there are no spans to put them in; 0 where there are.
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
    sub_buffers: int = SUB_BUFFERS
    spacing: float = 0.0


def chunk_bytes(link: Link, size: int) -> int:
    """R / p for a shard of `size` bytes: `CHUNK_SECONDS` of the link, and no more than some thousand in all."""
    wanted = max(int(CHUNK_SECONDS * link.bandwidth), size // 2000)
    return min(max(wanted, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def plan_traffic(
    profile: Profile, size: int, sends: int, link: Link, *, budget: float, interval: int = 1, safety: float = SAFETY,
    min_span: float = MIN_SPAN_SECONDS, sub_buffers: int = SUB_BUFFERS,
) -> TrafficPlan:  # fmt: skip
    """The shortest interval, of at least `interval` iterations, at which traffic stays within the budget.

    A snapshot has the spans of all iterations until the next one; what they do not hold is taken to stop training
    while it is sent, and may do so for `budget` of that time.

    Args:
        size: bytes of one replica; sends: m - 1.
        budget: share of training's time, such as 0.01. 0: what finds no room in idle spans is never sent.
        sub_buffers: p; one buffer is as large as p of them together.
    """
    chunk = chunk_bytes(link, size) * SUB_BUFFERS // sub_buffers
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
    room = f"{_mb(total)} to send every {found} iterations of {1e3 * profile.seconds:.0f} ms; "
    room += f"the network's idle spans hold {_mb(fits)} of each at {_mb(int(link.bandwidth))}/s"
    if missing:
        room += f", the rest costs at most {budget:.1%}"
    chunks = max(1, -(-total // chunk))
    spacing = 0.0 if fits else safety * found * profile.seconds / chunks
    return TrafficPlan(
        profile, link, found, chunk, fits, missing, room, safety, min_span, sub_buffers, spacing
    )  # fmt: skip


def delay(plan: TrafficPlan, at: float, backlog: float, size: int) -> float | None:
    """Seconds until a chunk of `size` bytes may be posted: Algorithm 2 as time goes on.

    Args:
        at: seconds since training went on after the last boundary.
        backlog: seconds until what is posted already has been sent, or, with a spacing, until the next is due.

    Returns:
        0.0 now; None: not in this iteration.
    """
    if plan.spacing:
        return max(0.0, backlog)
    lead = (plan.sub_buffers - 1) * plan.link.seconds(plan.chunk)
    if backlog > lead:
        return backlog - lead
    needed = backlog + plan.link.seconds(size)
    for span in plan.profile.spans:
        if span.length < plan.min_span or needed > plan.safety * span.length:
            continue
        if at + needed <= span.start + plan.safety * span.length:
            return max(0.0, span.start - at)
    return None


def _mb(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
