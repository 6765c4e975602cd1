"""How the bytes of a slot move over a checkpoint process group: chunk by chunk, with a window of transfers posted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from gemini_run.memory.header import SlotHeader
from gemini_run.memory.slots import Slot

OBJECTS_TAG = 8
FIRST_CHUNK_TAG = 9  #: tags below belong to what comes before the bodies

Span = tuple[int, int]  #: start and end in a slot's payload, bytes
Posted = tuple[Any, int]  #: a transfer under way and its bytes
Posts = Iterator[Posted]


def posts(
    post: Any, slot: Slot, header: SlotHeader, parts: Sequence[Span], peer: int, chunk_bytes: int,
    hold: Callable[[int], None] | None = None,
) -> Posts:  # fmt: skip
    """Post the objects and the parts of the payload chunk by chunk, each with its own tag, so order is no concern.

    Args:
        post: the group's `send` or `recv`.
        hold: called with a chunk's bytes before it is posted; blocks until it may be.
    """
    if header.objects_length:
        yield post([view(slot, header.objects_offset, header.objects_length)], peer, OBJECTS_TAG), 0
    tag = FIRST_CHUNK_TAG
    for start, end in parts:
        for at in range(start, end, chunk_bytes):
            size = min(chunk_bytes, end - at)
            if hold is not None:
                hold(size)
            yield post([view(slot, header.payload_offset + at, size)], peer, tag), size
            tag += 1


def at_once(
    sends: Sequence[Posts], receives: Sequence[Posts], window: int, timeout: timedelta
) -> list[tuple[float, int]]:
    """All streams side by side. Returns when each chunk arrived (time.perf_counter()), and its bytes."""
    arrived = []
    windows: list[tuple[Posts, deque[Posted], bool]] = [(stream, deque(), True) for stream in receives]
    windows += [(stream, deque(), False) for stream in sends]
    _fill(windows, window)
    while windows := [entry for entry in windows if entry[1]]:
        for _, posted, incoming in windows:
            work, size = posted.popleft()
            work.wait(timeout)
            if incoming:
                arrived.append((time.perf_counter(), size))
        _fill(windows, window)
    return arrived


def held_back(sends: Sequence[Posts], receives: Sequence[Posts], window: int, timeout: timedelta) -> None:
    """In the order of Algorithm 2: replica by replica, each chunk as the gate lets it. No peer may ever wait for this
    rank to receive, so all of that is posted first."""
    expected = [work for stream in receives for work, _ in stream]
    posted: deque[Any] = deque()
    for stream in sends:
        for work, _ in stream:
            posted.append(work)
            if len(posted) >= window:
                posted.popleft().wait(timeout)
    for work in (*posted, *expected):
        work.wait(timeout)


def view(slot: Slot, start: int, length: int) -> torch.Tensor:
    """Bytes of a slot file as they lie in memory."""
    if not length:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(slot.view, dtype=torch.uint8, count=length, offset=start)


def _fill(windows: Sequence[tuple[Posts, deque[Posted], bool]], window: int) -> None:
    for stream, posted, _ in windows:
        while len(posted) < window and (work := next(stream, None)) is not None:
            posted.append(work)
