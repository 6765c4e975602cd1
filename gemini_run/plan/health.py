"""Who watches whom, and when a watched node counts as lost. Pure: the time is an argument."""

from __future__ import annotations

import dataclasses

HEARTBEAT_SECONDS = 0.5  #: a watched agent writes a byte to its watchers this often
SILENCE_SECONDS = 2.5  #: longest silence of a living node; lost is said within 3 s of the last byte
EVERYONE = 8  #: up to so many nodes all watch all
STALL_SECONDS = 1.0  #: a watcher that did not run for so long was frozen or starved itself, and heard nobody
RING_WATCHES = 3  #: above that each node watches its next few: a lost one is still seen by three


def watch_targets(node_rank: int, num_nodes: int) -> tuple[int, ...]:
    """The node ranks that `node_rank` watches: everyone in a small job, else the next few in the ring."""
    count = num_nodes - 1 if num_nodes <= EVERYONE else RING_WATCHES
    return tuple((node_rank + step) % num_nodes for step in range(1, count + 1))


@dataclasses.dataclass(frozen=True)
class Observation:
    """What is known of one watched node.

    Attributes:
        last_heard: when its last byte came, or when the watch began. Same clock as `now` of `verdict`.
        stream_ended: its stream was closed or reset and is not open again.
        refused: connecting again was refused: nothing listens there any more.
        left: it said that it is going (stopped on purpose, the job not finished).
    """

    last_heard: float
    stream_ended: bool = False
    refused: bool = False
    left: bool = False


def verdict(seen: Observation, now: float) -> str | None:
    """Why the node counts as lost, in words, or None as long as it does not.

    A stream that ends is no proof by itself (a proxy, a full table): only together with a refused
    reconnection, or with silence.
    """
    if seen.left:
        return "its agent was stopped"
    if seen.stream_ended and seen.refused:
        return "its agent ended (connection closed, then refused)"
    silent = now - seen.last_heard
    if silent > SILENCE_SECONDS:
        return f"silent for {silent:.1f} s"
    return None


def awake_since(awake: float, last_tick: float, now: float) -> float:
    """Since when a watcher has been running without a break: what it did not hear while it was stopped proves nothing.

    Args:
        awake: the answer at `last_tick`, when it was last seen to run.
    """
    return now if now - last_tick > STALL_SECONDS else awake


def patience(seen: Observation, now: float) -> float:
    """Seconds from `now` until silence alone makes `verdict` speak; 0 when it would already."""
    return max(0.0, seen.last_heard + SILENCE_SECONDS - now)
