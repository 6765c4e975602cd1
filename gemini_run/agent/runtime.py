"""What the parts of one node's agent share: the node itself, and the round it is in."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gemini_run.config import Settings
from gemini_run.journal import append_event
from gemini_run.memory.segment import NodeMemory
from gemini_run.plan.recovery import RecoveryPlan
from gemini_run.terminal import say
from gemini_run.wire import RunPaths

if TYPE_CHECKING:
    from gemini_run.agent.server import AgentServer


@dataclasses.dataclass
class NodeRuntime:
    """One node, from its agent's start to its end.

    Attributes:
        durable_at: unix seconds of the newest durable checkpoint that this node knows of, or of the run's first round;
            0 before either. The interval of the durable tier counts from here, over all rounds.
    """

    settings: Settings
    run_id: str
    paths: RunPaths
    memory: NodeMemory
    server: AgentServer
    durable_at: float = 0.0
    _event_failed: bool = dataclasses.field(default=False, init=False, repr=False)

    def event(self, name: str, **fields: Any) -> None:
        """Append to the run's event log. A run home that cannot be written is said once and ends nothing."""
        try:
            append_event(self.paths.events, name, node=self.memory.node_id, **fields)
        except OSError as error:
            if not self._event_failed:
                self._event_failed = True
                say(
                    f"events are not recorded: {self.paths.events}: {error.strerror or error}; training goes on "
                    "(GEMINI_RUN_HOME names another place)"
                )


@dataclasses.dataclass(frozen=True)
class PeerNode:
    """A node of the present round, as its peers reach it.

    Attributes:
        token: what its server asks of callers; made by that agent, exchanged through the rendezvous.
        failure_domain: what it fails together with, None = nothing that it knows of.
        role: of its workers (torchrun's ``--role``).
    """

    node_id: str
    hostname: str
    host: str
    port: int
    local_world_size: int
    token: str = dataclasses.field(default="", repr=False)
    failure_domain: str | None = None
    role: str = "default_role"


@dataclasses.dataclass(frozen=True)
class RoundInfo:
    """One round, the same on all nodes but for `node_rank` and `restore_source`.

    Attributes:
        number: restart generation, 0 at first, equal on all nodes.
        node_rank: of this node; sticky over rounds.
        num_nodes: in this round.
        nodes: in node-rank order.
        plan: what was restored, and from where.
        store_host, store_port: the round's own store, for the workers.
        lost_iterations: finished before, to be repeated.
        restore_source: what made this node's slots complete: "local", "peer", "durable" or "none".
    """

    number: int
    node_rank: int
    num_nodes: int
    nodes: tuple[PeerNode, ...]
    plan: RecoveryPlan
    store_host: str
    store_port: int
    lost_iterations: int
    restore_source: str

    @property
    def world_size(self) -> int:
        return sum(node.local_world_size for node in self.nodes)

    @property
    def failure_domains(self) -> tuple[str | None, ...] | None:
        """Of each node, None if none of them knows its own."""
        domains = tuple(node.failure_domain for node in self.nodes)
        return domains if any(domain is not None for domain in domains) else None

    @property
    def resharded(self) -> bool:
        """Whether it goes on from a checkpoint of another number of ranks."""
        return self.plan.iteration is not None and self.plan.world_size != self.world_size
