"""All that two processes agree on: variable names, paths, store keys, exit codes, messages.

Nothing here acts. A name used by more than one process has its one home in this file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from gemini_run.ids import safe_name

# --- environment ---------------------------------------------------------------------------------

ENV_RUN_HOME = "GEMINI_RUN_HOME"  #: user: where runs keep run.json, events and logs
ENV_WORKER = "GEMINI_WORKER"  #: agent -> worker: WorkerContext as JSON, new in every round
ENV_BOOT = "GEMINI_BOOT"  #: agent -> bootstrap: how this interpreter starts (removed before __main__)

EXIT_REPLAN = 87  #: a worker refused its slot: plan again, from the next source, at no cost in budget
EXIT_FATAL = 88  #: a worker met what no restart can mend (its error file says what): end the run

# --- run home: $GEMINI_RUN_HOME/runs/<run id>/ -----------------------------------------------------


def run_home() -> Path:
    """``$GEMINI_RUN_HOME``, else ``$XDG_STATE_HOME/gemini-run``, else ``~/.local/state/gemini-run``."""
    if home := os.environ.get(ENV_RUN_HOME):
        return Path(home)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "gemini-run"


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """Every file name of one run's directory."""

    root: Path

    @classmethod
    def of(cls, run_id: str, home: Path | None = None) -> RunPaths:
        return cls((home or run_home()) / "runs" / safe_name(run_id))

    @property
    def run_json(self) -> Path:
        """Facts fixed at the start: id, command line, configuration, hosts."""
        return self.root / "run.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def imports(self) -> Path:
        """Third-party modules that this run's script was seen to import (a JSON list), for the next zygotes."""
        return self.root / "imports.json"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    def node_json(self, node_id: str) -> Path:
        """A node's own status, replaced atomically by its agent about once a second."""
        return self.nodes / f"{node_id}.json"


# --- host memory: <base>/gemini-run-<uid>/<run id>/<node id>/ --------------------------------------

DEFAULT_MEMORY_BASE = Path("/dev/shm")


def memory_root(base: Path = DEFAULT_MEMORY_BASE) -> Path:
    return base / f"gemini-run-{os.getuid()}"


def run_memory(run_id: str, base: Path = DEFAULT_MEMORY_BASE) -> Path:
    return memory_root(base) / safe_name(run_id)


@dataclasses.dataclass(frozen=True)
class MemoryPaths:
    """Every file name of one node's host memory."""

    root: Path

    @property
    def node_json(self) -> Path:
        return self.root / "node.json"

    @property
    def lock(self) -> Path:
        """Locked by the living agent; a directory whose lock is free can be adopted."""
        return self.root / "lock"

    @property
    def reserve(self) -> Path:
        """Room for the small files here, kept back (`memory.reserve`)."""
        return self.root / "reserve"

    @property
    def slots(self) -> Path:
        return self.root / "slots"

    @property
    def beacons(self) -> Path:
        return self.root / "beacons"

    @property
    def reshard(self) -> Path:
        """Where the shards are that this round's ranks are made from (Reshard), after a change of the world size."""
        return self.root / "reshard.json"

    @property
    def durable_refused(self) -> Path:
        """Iterations of the durable tier that workers could not make their state from (a JSON list)."""
        return self.root / "durable_refused.json"

    def slot(self, owner: int, index: int) -> Path:
        """Slot `index` of the shard owned by global rank `owner` (own shard or a peer's replica)."""
        return self.slots / f"r{owner:05d}.{index}"

    def beacon(self, local_rank: int) -> Path:
        return self.beacons / f"l{local_rank:03d}"


# --- keys in the round's store (a fresh TCPStore per round) ----------------------------------------


def key_group(group: int, local_rank: int) -> str:
    """Prefix under which one checkpoint process group finds itself."""
    return f"gemini/pg/{group}/{local_rank}"


def key_holds(rank: int) -> str:
    """What a rank holds, as a checksum of checksums (see worker.joining)."""
    return f"gemini/holds/{rank}"


KEY_TOGETHER = "gemini/together"  #: per node the first node that holds the same (a JSON list), set by rank 0


def key_commit_count(iteration: int) -> str:
    """Counter: how many ranks hold `iteration` (own slot and received replicas) complete."""
    return f"gemini/commit/{iteration}/count"


def key_commit_record(iteration: int) -> str:
    """CommitRecord as JSON, set by rank 0 before it counts itself."""
    return f"gemini/commit/{iteration}/record"


def key_commit_void(iteration: int) -> str:
    """Counter: how many ranks have no copy of something at `iteration`: then it is not committed."""
    return f"gemini/commit/{iteration}/void"


def key_node_count(node: int, iteration: int) -> str:
    """Counter: how many ranks of the node hold their own slot of `iteration` complete."""
    return f"gemini/node/{node}/{iteration}/count"


def key_node_torn(node: int, iteration: int) -> str:
    """Counter: how many ranks of the node have dropped theirs."""
    return f"gemini/node/{node}/{iteration}/torn"


def key_node_done(node: int, iteration: int) -> str:
    """Set once all do, to the number of those that have dropped it."""
    return f"gemini/node/{node}/{iteration}/done"


def key_commit(iteration: int) -> str:
    """The same record, set by the last rank to count itself: `iteration` is committed."""
    return f"gemini/commit/{iteration}/done"


KEY_INTERVAL = "gemini/interval"  #: Interval as JSON: the longest that any rank needs; rank 0 sets it first
KEY_LEFT = "gemini/left"  #: set when a rank stops checkpointing for good: waiting for it is useless


@dataclasses.dataclass(frozen=True)
class CommitRecord:
    """What all ranks learn when an iteration is complete on every rank; rank 0 decides its content.

    Attributes:
        iteration: the newest committed iteration: the one that was agreed on, or, if that is void, the one before.
        next_iteration: the next one to snapshot (known to all before anyone reaches it).
        next_durable: hold that next one's slots for the durable tier.
        void: that iteration has not all of its slots: some rank's state, or a replica, is missing.
        following: the one after the next comes no sooner than so many iterations behind it. Training need not know
            more until then: the next one has so much time to be committed.
    """

    iteration: int
    next_iteration: int
    next_durable: bool
    following: int = 1
    void: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> CommitRecord:
        return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class Interval:
    """Iterations between snapshots that a rank needs.

    Attributes:
        reason: for people.
        passing: only while a profile is made: no news.
        rank: who says so; it may lower it as well.
    """

    iterations: int
    reason: str
    passing: bool = False
    rank: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Interval:
        return cls(**json.loads(text))


# --- agent -> worker -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What the agent tells a worker of one round (``GEMINI_WORKER``). Ranks come from torchrun's
    own variables (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE)."""

    run_id: str
    run_dir: str  #: RunPaths.root, for events
    round: int  #: restart generation, equal on all nodes; fencing token of slots
    node_id: str
    node_rank: int
    num_nodes: int
    memory_dir: str  #: MemoryPaths.root of this node
    store_host: str  #: this round's store
    store_port: int
    replicas: int  #: copies of a shard including the local one (m)
    failure_domains: tuple[str | None, ...] | None = None  #: of each node, see plan.placement
    snapshot_interval: int  #: iterations between snapshots, 1 = every iteration
    durable_iterations: int | None  #: hold every n-th iteration for the durable tier
    durable_seconds: float | None  #: or one each so many seconds
    durable_at: float = 0.0  #: unix seconds from which they count, 0 = from the worker's start
    late_copy: str = "auto"  #: see worker.late.Late
    restore_iteration: int | None  #: the slot to restore from, None = fresh start
    restore_source: str  #: "local" | "peer" | "durable" | "none": what made that slot complete here
    reshard_from: int | None = None  #: ranks of the job that took it, where that is another number: see Reshard
    overhead_budget: float | None = None  #: share of training's time that replicas may cost, None = sent at once
    lost_iterations: int = 0  #: finished before the failure, to be repeated

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> WorkerContext:
        raw: dict[str, Any] = json.loads(text)
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{k: v for k, v in raw.items() if k in known})

    @classmethod
    def from_env(cls) -> WorkerContext | None:
        """The context of this process, or None outside gemini-run."""
        text = os.environ.get(ENV_WORKER)
        return cls.from_json(text) if text else None


@dataclasses.dataclass(frozen=True)
class ShardPlace:
    """Where the slot of one old rank can be read: here, or from the agents of peers.

    Attributes:
        owner: the old rank.
        path: slot file on this node, None where it has none.
        peers: (host, port, token) of the agents that serve it.
    """

    owner: int
    path: str | None
    peers: tuple[tuple[str, int, str], ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Reshard:
    """What ranks of a new world are made from: the shards of an old one, in memory or in the durable tier.

    Attributes:
        iteration: of all of them.
        world_size: of the old world.
        round: the one that restores from them.
        places: with shards in memory, of every old rank.
        durable: location of the tier, None = they are in memory.
    """

    iteration: int
    world_size: int
    round: int
    places: tuple[ShardPlace, ...]
    durable: str | None

    def to_json(self) -> dict[str, Any]:
        return {"version": RESHARD_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Reshard:
        """Raises: ValueError for a version that this release does not know."""
        if raw.get("version") != RESHARD_VERSION:
            raise ValueError(f"of format version {raw.get('version')}; this release reads version {RESHARD_VERSION}")
        places = tuple(
            ShardPlace(p["owner"], p["path"], tuple((h, n, t) for h, n, t in p["peers"])) for p in raw["places"]
        )
        return cls(raw["iteration"], raw["world_size"], raw["round"], places, raw["durable"])


RESHARD_VERSION = 1

# --- agent <-> agent (HTTP) ------------------------------------------------------------------------

HTTP_SLOT = "/v1/slots/{owner}/{iteration}"  #: GET with Range: raw bytes of a complete slot file
HTTP_RPC = "/v1/rpc/{name}"  #: POST JSON -> JSON
HTTP_GENERATION = "Gemini-Generation"  #: header: round of the caller; one older than the server's is refused
HTTP_WATCH = "/v1/watch"  #: GET: a stream that ends when the agent does
