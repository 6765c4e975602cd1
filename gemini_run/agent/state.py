"""What the agent knows of its own doings, for the node's status file."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class AgentState:
    """Written by the agent's main thread, read by the reporter's; each field is replaced whole.

    Attributes:
        phase: "starting", "rendezvous", "spare" (waits for a place in the job), "running", "finished" (own workers
            succeeded), "succeeded", "failed" or "stopped" (by a signal).
        round: number of the present round, None before the first.
        workers: local rank -> (global rank, pid) of the present round.
        last_failure: of a worker of this node, in words; None as long as there was none.
        restarts_left: restarts without progress that remain.
    """

    phase: str = "starting"
    round: int | None = None
    workers: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    last_failure: str | None = None
    restarts_left: int | None = None
