"""A job and its cluster, and what follows from them: traffic, memory, times, rates of failures. Pure."""

from __future__ import annotations

import dataclasses
import functools
from math import ceil, exp, expm1, lgamma, log, log1p

from gemini_run.plan.placement import Placement, placement
from gemini_run.plan.probability import domain_recovery, recovery_probability

DAY = 86_400.0
#: fp32 master weights and both Adam moments, of each parameter (paper, section 2)
BYTES_PER_PARAMETER = 12
#: more losses at once than are this likely are left out
_RARE = 1e-15
#: and more than this count as fatal
_MOST_TOGETHER = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A job and the cluster that it runs on. Sizes in bytes, times in seconds, rates per day.

    Attributes:
        num_nodes: N.
        state_bytes: of one whole copy of the training state.
        replicas: m, copies of a shard in host memory, the local one included.
        network_bytes_per_s: of one node, one direction.
        storage_bytes_per_s: of the durable tier, all nodes together.
        iteration_s: one iteration without checkpoints.
        failures_per_node_day: a node is lost with its memory.
        process_failures_per_node_day: workers die, host memory survives.
        shard_nodes: nodes that the state is sharded over; the other nodes hold the same shards again. None: all.
        domain_nodes: nodes in one failure domain (the last may have fewer); None: no domains.
        domain_failures_per_day: of each domain; all its nodes are lost at once.
        spares: nodes that wait; each takes over at once and is itself replaced after `replacement_s`.
        replacement_s: until a new node is there, where no spare is.
        detection_s, restart_s: until a failure is seen; until training runs again, without loading.
        network_share: of the link's time, what training leaves to replicas.
        serialize_bytes_per_s: of a node that writes its part for the durable tier while training waits.
        durable_stall_s: that a durable checkpoint costs training where memory holds it already. None: its bytes take
            the node's link from training as long as they need at full speed.
        durable_interval_s: None: as `durable_choice` has it.
        duration_s: of the training, where nothing is checkpointed.

    Raises:
        ValueError: a value out of range; names the attribute.
    """

    num_nodes: int
    state_bytes: float
    replicas: int
    network_bytes_per_s: float
    storage_bytes_per_s: float
    iteration_s: float
    failures_per_node_day: float
    process_failures_per_node_day: float = 0.0
    shard_nodes: int | None = None
    domain_nodes: int | None = None
    domain_failures_per_day: float = 0.0
    spares: int = 0
    replacement_s: float = 330.0
    detection_s: float = 3.0
    restart_s: float = 60.0
    network_share: float = 0.5
    serialize_bytes_per_s: float = 1e9
    durable_stall_s: float | None = None
    durable_interval_s: float | None = None
    duration_s: float = 7 * DAY

    def __post_init__(self) -> None:
        for name in ("state_bytes", "network_bytes_per_s", "storage_bytes_per_s", "iteration_s", "network_share",
                     "serialize_bytes_per_s", "duration_s", "durable_interval_s"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}: {value:g}, must be more than 0")
        for name in ("failures_per_node_day", "process_failures_per_node_day", "domain_failures_per_day", "spares",
                     "replacement_s", "detection_s", "restart_s", "durable_stall_s"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}: {value:g}, must be 0 or more")
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes: {self.num_nodes}, must be 1 or more")
        if not 1 <= self.replicas <= self.num_nodes:
            raise ValueError(f"replicas: {self.replicas}, must be from 1 up to the {self.num_nodes} node(s)")
        for name in ("shard_nodes", "domain_nodes"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= self.num_nodes:
                raise ValueError(f"{name}: {value}, must be from 1 up to the {self.num_nodes} node(s)")
        if self.shard_nodes and self.num_nodes % self.shard_nodes:
            raise ValueError(f"shard_nodes: {self.shard_nodes} does not divide the {self.num_nodes} nodes")
        if self.domain_failures_per_day and not self.domain_nodes:
            raise ValueError("domain_failures_per_day: needs domain_nodes")
        if self.network_share > 1:
            raise ValueError(f"network_share: {self.network_share:g}, must be at most 1")

    # --- placement and traffic ---

    @property
    def domains(self) -> list[str] | None:
        """Failure domain by node: consecutive nodes."""
        return None if not self.domain_nodes else [f"d{node // self.domain_nodes}" for node in range(self.num_nodes)]

    @functools.cached_property
    def placement(self) -> Placement:
        shards = self.shard_nodes or self.num_nodes
        alike = None if shards == self.num_nodes else [f"s{node % shards}" for node in range(self.num_nodes)]
        return placement(self.num_nodes, self.replicas, domains=self.domains, alike=alike)

    @functools.cached_property
    def copies_sent(self) -> int:
        """Most copies that any node sends or receives at a checkpoint; m - 1 unless nodes hold shards alike."""
        plan, nodes = self.placement, range(self.num_nodes)
        return max(max(len(plan.sends_to(n)), len(plan.receives_from(n))) for n in nodes)

    @property
    def node_bytes(self) -> float:
        """What the workers of one node save of one iteration."""
        return self.state_bytes / (self.shard_nodes or self.num_nodes)

    @property
    def host_memory_bytes(self) -> float:
        """Per node, two slots a copy: 2 * m * node_bytes (paper, 3.1); one more of the own shards is held while the
        durable tier takes it (`held_bytes`)."""
        return 2 * (1 + self.copies_sent) * self.node_bytes

    @property
    def held_bytes(self) -> float:
        return self.node_bytes

    @property
    def transfer_s(self) -> float:
        """The link's own time for a checkpoint's replicas."""
        return self.copies_sent * self.node_bytes / self.network_bytes_per_s

    @property
    def memory_interval(self) -> int:
        """Iterations between checkpoints into memory: 1 if the link has room for their traffic."""
        return max(1, ceil(self.transfer_s / self.network_share / self.iteration_s - 1e-9))

    @property
    def fetch_s(self) -> float:
        """A replacement node pulls its shards from peers."""
        return self.node_bytes / self.network_bytes_per_s if self.replicas > 1 or self.placement.alike else 0.0

    @property
    def upload_s(self) -> float:
        """The durable tier takes, or gives, one whole state."""
        return self.state_bytes / self.storage_bytes_per_s

    @property
    def serialize_s(self) -> float:
        return self.node_bytes / self.serialize_bytes_per_s

    @property
    def held_stall_s(self) -> float:
        return self.node_bytes / self.network_bytes_per_s if self.durable_stall_s is None else self.durable_stall_s

    # --- failures: rates per second ---

    @property
    def node_rate(self) -> float:
        return self.num_nodes * self.failures_per_node_day / DAY

    @property
    def process_rate(self) -> float:
        return self.num_nodes * self.process_failures_per_node_day / DAY

    @property
    def domain_rate(self) -> float:
        count = ceil(self.num_nodes / self.domain_nodes) if self.domain_nodes else 0
        return count * self.domain_failures_per_day / DAY

    @property
    def rate(self) -> float:
        return self.node_rate + self.process_rate + self.domain_rate

    def wait_s(self, lost: int) -> float:
        """Mean wait for `lost` new nodes at once: `replacement_s` unless enough spares are there.

        Nodes on order are Poisson (M/G/infinity); where spares run out the whole time counts, which is too much by
        what an earlier order has already waited.
        """
        if self.spares < lost:
            return self.replacement_s
        on_order = (self.node_rate + self.domain_rate * (self.domain_nodes or 0)) * self.replacement_s
        return self.replacement_s * (1 - poisson_at_most(self.spares - lost, on_order))

    @functools.cached_property
    def fatal_share(self) -> tuple[float, float]:
        """Of lost nodes, and of lost domains: the part after which some shard has no copy in memory.

        A lost node leaves its copies short until it is replaced and has them again. Each other node is lost within
        that window with the same probability, and counts as lost at once; a lost domain is taken alone.
        """
        window = self.detection_s + self.wait_s(1) + self.restart_s + self.fetch_s
        chance = min(-expm1(-self.failures_per_node_day / DAY * window), 1 - 1e-12)  # log of what is left
        together = _together(self.num_nodes - 1, chance)
        survive = recovery_probability(self.placement, len(together))
        # Summed from the small side: 1 less the safe part would be rounding alone where many copies are kept.
        fatal = sum(odds * float(1 - survive[1 + more]) for more, odds in enumerate(together))
        if len(together) > _MOST_TOGETHER:
            fatal += max(0.0, 1 - sum(together))
        beyond = 0.0 if self.domains is None else float(1 - domain_recovery(self.placement, self.domains, 1)[1])
        return min(1.0, fatal), beyond

    def with_replicas(self, replicas: int) -> Job:
        return dataclasses.replace(self, replicas=replicas)


def _together(others: int, chance: float) -> list[float]:
    """Binomial: odds that 0, 1, ... of `others` nodes are lost, without the tail rarer than `_RARE`; at most
    `_MOST_TOGETHER` + 1 of them."""
    odds: list[float] = []
    for more in range(min(others, _MOST_TOGETHER) + 1):
        ways = lgamma(others + 1) - lgamma(more + 1) - lgamma(others - more + 1)
        lost = more * log(chance) if more else 0.0
        left = (others - more) * log1p(-chance) if more < others else 0.0
        odds.append(exp(ways + lost + left))
        if chance == 0 or (more > others * chance and odds[-1] < _RARE):
            break
    return odds


def poisson_at_most(count: int, mean: float) -> float:
    """P(X <= count) of a Poisson X."""
    if mean == 0:
        return 1.0
    return min(1.0, sum(exp(k * log(mean) - mean - lgamma(k + 1)) for k in range(count + 1)))
