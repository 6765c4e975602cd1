"""What can be had back from this machine and from the durable tier: found, planned, and copied out. Only reads.

Where a running job writes to a slot that is being read (`cli.copies`), all is looked at again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemini_run.cli.copies import Copy, Overwritten, stage_copy, verify_in_place
from gemini_run.cli.view import NodeView, RunView, known_runs, load_run, memory_view
from gemini_run.errors import ConfigError, GeminiError, ReplicaCorrupt, UnknownRun, Unrecoverable
from gemini_run.memory.header import SlotHeader
from gemini_run.memory.segment import NodeMemory, SlotInfo
from gemini_run.memory.settle import settle_folder
from gemini_run.memory.slots import Slot
from gemini_run.plan.recovery import (
    History,
    NodeFacts,
    RecoveryPlan,
    SlotFact,
    agreed_history,
    as_history,
    on_course,
    plan_recovery,
    rank_ranges,
)
from gemini_run.wire import RunPaths

ATTEMPTS = 50  #: looks at a running job's slots before giving up
PAUSE_SECONDS = 0.02
COPY_THREADS = 4


@dataclasses.dataclass(frozen=True)
class Place:
    """Where to look.

    Attributes:
        what: for people.
        run_id: None where only a directory was named.
        durable: location of the durable tier, None = none.
        over: the run has finished well (and so has freed its memory).
    """

    what: str
    run_id: str | None
    memories: tuple[Path, ...]
    durable: str | None
    over: bool = False


@dataclasses.dataclass(frozen=True)
class RankSource:
    """Where one rank's shard is taken from. `tier`: "local memory", "peer memory" or "durable"."""

    rank: int
    iteration: int
    tier: str
    node: str | None
    source: str
    num_bytes: int | None
    why: str
    copy: Copy | None


@dataclasses.dataclass(frozen=True)
class Salvage:
    """The plan over what was found.

    Attributes:
        ranks: one each, empty where the plan has no iteration.
        refused: (file, why) of slots that cannot be used.
        durable_iteration: newest committed one of the durable tier.
        durable_problem: why the durable tier could not be read, None = it could or there is none.
    """

    place: Place
    plan: RecoveryPlan
    ranks: tuple[RankSource, ...]
    refused: tuple[tuple[str, str], ...]
    durable_iteration: int | None
    durable_problem: str | None


# --- where to look -----------------------------------------------------------------------------------


def find(target: str | None) -> Place:
    """What the user means by `target`: a run id, a directory, an s3:// location, or the newest run.

    Raises:
        UnknownRun: there is no such thing here.
    """
    if target is None:
        runs = known_runs()
        if not runs:
            raise UnknownRun("no run is known on this machine; name a directory or s3://bucket/prefix to look at")
        return _of_run(load_run(runs[0]))
    if target.startswith("s3://"):
        return Place(target, None, (), target)
    if RunPaths.of(target).run_json.exists() or not os.path.isdir(target):
        return _of_run(load_run(target))
    directory = Path(target).resolve()
    if (directory / "run.json").is_file():
        return _of_run(load_run(directory.name))
    if memory_view(directory):
        return Place(target, None, (directory,), None)
    nodes = tuple(path for path in sorted(directory.iterdir()) if path.is_dir() and memory_view(path))
    if nodes:
        return Place(target, None, nodes, None)
    if any(path.is_dir() and path.name.startswith("it-") for path in directory.iterdir()):
        return Place(target, None, (), str(directory))
    raise UnknownRun(f"{target} is no memory directory of a run and no durable tier (neither slots nor it-* in it)")


def _of_run(run: RunView) -> Place:
    memories = tuple(n.memory.root for n in (*run.nodes, *run.former) if n.memory)
    over = bool(run.nodes) and all(node.state == "succeeded" for node in run.nodes)
    return Place(f"run {run.run_id}", run.run_id, memories, run.durable, over)


# --- the plan ----------------------------------------------------------------------------------------


def salvage(place: Place, *, check: bool = True) -> Salvage:
    """Plan over what is there now. With `check` every byte that the plan uses has been verified.

    Raises:
        GeminiError: the job writes faster than this can read.
    """
    durable, problem = _newest_durable(place.durable)
    for _ in range(ATTEMPTS):
        try:
            return _attempt(place, durable, problem, check=check)
        except Overwritten:
            time.sleep(PAUSE_SECONDS)
    raise GeminiError(
        f"{place.what}: the running job overwrites its slots faster than they can be read; try again, stop the job "
        "first (its memory stays), or name the durable tier"
    )


def _attempt(place: Place, durable: int | None, problem: str | None, *, check: bool) -> Salvage:
    views = [view for path in place.memories if (view := memory_view(path))]
    refused = {str(info.path): info.problem for view in views for info in view.slots if info.problem}
    bad: set[Path] = set()
    while True:
        worlds = [(nodes, copies, _plan(nodes, durable, place)) for nodes, copies in _worlds(views, bad)]
        # A job that has just changed its size holds slots of both; those of the new one may not be complete yet.
        nodes, copies, plan = max(worlds, key=lambda world: -1 if world[2].iteration is None else world[2].iteration)
        ranks = tuple(_sources(nodes, copies, plan, place))
        found = len(refused)
        for rank in ranks if check else ():
            if rank.copy is not None:
                try:
                    verify_in_place(rank.copy)
                except ReplicaCorrupt as error:
                    refused[str(rank.copy.path)] = _without_path(str(error), rank.copy.path)
                    bad.add(rank.copy.path)
        if len(refused) == found:
            listed = tuple((path, str(why)) for path, why in sorted(refused.items()))
            return Salvage(place, plan, ranks, listed, durable, problem)


Files = dict[tuple[int, int, int], list[Copy]]  #: by (node rank, owner, iteration)


def _worlds(views: Sequence[NodeView], bad: set[Path]) -> list[tuple[list[NodeFacts], Files]]:
    """Each world that slots are of, node by node, and its files; the one of the newest slot first; never empty.

    Nodes whose memory is not here bring nothing. Several directories may claim one node rank (a lost node's is
    found beside its replacement's): they count as one node.
    """
    files = [(view, info, info.header) for view in views for info in view.slots
             if info.usable and info.header and info.path not in bad]  # fmt: skip
    history = agreed_history(as_history(view.notes.get("history", ())) for view in views)
    valid = [entry for entry in files if on_course(entry[2].round, entry[2].iteration, history)]
    newest: dict[int, tuple[int, int]] = {}
    for _, _, header in valid:
        newest[header.world_size] = max(newest.get(header.world_size, (0, 0)), (header.iteration, header.round))
    return [
        _inventory(size, history, [entry for entry in valid if entry[2].world_size == size])
        for size in sorted(newest, key=lambda size: newest[size], reverse=True)
    ] or [([], {})]


def _inventory(
    world_size: int, history: History, files: Sequence[tuple[NodeView, SlotInfo, SlotHeader]]
) -> tuple[list[NodeFacts], Files]:
    sizes = _local_world_sizes([info for _, info, _ in files], world_size)
    slots: dict[int, list[SlotFact]] = {rank: [] for rank in range(len(sizes))}
    names: dict[int, str] = {}
    copies: Files = {}
    for view, info, header in files:
        rank = view.node_rank if view.node_rank in slots else 0
        assert rank is not None, "a rank of the world"
        names.setdefault(rank, view.node_id)
        fact = SlotFact(
            header.owner, header.iteration, header.round, header.world_size, bool(header.sealed), header.end
        )
        slots[rank].append(fact)
        copies.setdefault((rank, header.owner, header.iteration), []).append(
            Copy(view.node_id, rank, info.path, header)
        )
    nodes = [
        NodeFacts(names.get(rank, f"node {rank}"), rank, size, tuple(slots[rank]), history)
        for rank, size in enumerate(sizes)
    ]
    return nodes, copies


def _local_world_sizes(infos: Sequence[SlotInfo], world_size: int) -> list[int]:
    """Ranks per node, as the shards themselves say; where a node's are all missing, as many as on another."""
    said: dict[int, int] = {}
    for info in infos:
        header = info.header
        if header is None or header.owner in said:
            continue
        try:
            slot = Slot(info.path)
            try:
                said[header.owner] = slot.manifest(header).local_world_size
            finally:
                slot.close()
        except (ReplicaCorrupt, FileNotFoundError):
            continue  # judged when its bytes are verified
    usual = next(iter(said.values()), world_size)
    sizes: list[int] = []
    while (first := sum(sizes)) < world_size:
        sizes.append(max(1, min(said.get(first, usual), world_size - first)))
    return sizes


def _plan(nodes: Sequence[NodeFacts], durable: int | None, place: Place) -> RecoveryPlan:
    plan = plan_recovery(nodes, durable)
    if not nodes and plan.source == "none" and place.over:
        return dataclasses.replace(plan, reason=f"{place.what} has finished and freed its memory; {plan.reason}")
    return plan


def _sources(nodes: Sequence[NodeFacts], copies: Files, plan: RecoveryPlan, place: Place) -> Iterator[RankSource]:
    if plan.iteration is None:
        return
    if plan.source == "durable":
        for rank in range(_durable_world(str(place.durable), plan.iteration)):
            yield RankSource(rank, plan.iteration, "durable", None, str(place.durable), None, plan.reason, None)
        return
    pulled = {fetch.owner: fetch.from_node for fetch in plan.fetches}
    for node, own in zip(nodes, rank_ranges([n.local_world_size for n in nodes]), strict=True):
        for rank in own:
            holder = pulled.get(rank, node.node_rank)
            copy = copies[holder, rank, plan.iteration][0]
            if rank in pulled:
                tier, why = "peer memory", f"node {node.node_rank} holds no usable copy here"
            else:
                tier, why = "local memory", "complete on its own node"
            yield RankSource(
                rank, plan.iteration, tier, copy.node, str(copy.path), copy.header.end, why, copy
            )  # fmt: skip


def _newest_durable(location: str | None) -> tuple[int | None, str | None]:
    if location is None:
        return None, None
    from gemini_run.durable.checkpoint import newest_committed
    from gemini_run.durable.tier import open_tier

    try:
        return newest_committed(open_tier(location)), None
    except (GeminiError, OSError) as error:
        return None, str(error)


def _durable_world(location: str, iteration: int) -> int:
    from gemini_run.durable.checkpoint import read_marker
    from gemini_run.durable.tier import open_tier

    return read_marker(open_tier(location), iteration).world_size


def stage(found: Salvage, folder: Path) -> dict[int, Path]:
    """Private, verified and sealed copies of every rank's slot, by rank, in `folder` (which must exist and be empty).

    Raises:
        Overwritten: the running job was faster; plan and stage again, in an empty folder.
        ReplicaCorrupt, DurableError: a source is bad.
    """
    if found.plan.source == "durable":
        return _stage_durable(found, folder)
    with concurrent.futures.ThreadPoolExecutor(COPY_THREADS) as pool:
        # All at once: a running job gives each slot about one iteration's time.
        jobs = {r.rank: pool.submit(stage_copy, r.copy, folder / f"r{r.rank:05d}") for r in found.ranks if r.copy}
        staged = {rank: job.result() for rank, job in jobs.items()}
    settle_folder(staged.values())
    return staged


def _stage_durable(found: Salvage, folder: Path) -> dict[int, Path]:
    from gemini_run.durable.checkpoint import materialise
    from gemini_run.durable.tier import open_tier

    tier = open_tier(str(found.place.durable))
    memory = NodeMemory.claim("export", folder)
    staged = {}
    try:
        for rank in found.ranks:
            staged[rank.rank] = materialise(tier, rank.iteration, rank.rank, len(found.ranks), memory, 0)
    finally:
        memory.release(remove=False)
    return staged


def nothing_found(found: Salvage) -> Unrecoverable:
    """The error that says that, and why."""
    why = found.plan.reason
    if found.durable_problem:
        why += f" ({found.durable_problem})"
    if found.refused:
        why += f"; {len(found.refused)} slot(s) refused"
    return Unrecoverable(f"{found.place.what}: no complete checkpoint found: {why}")


def check_target(path: Path) -> None:
    """Raises: ConfigError where an export to `path` would overwrite something or cannot be written."""
    if os.path.lexists(path):
        raise ConfigError(f"--to {path}: it exists, and is not overwritten; name another path or remove it")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"--to {path}: there is no directory {parent}")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"--to {path}: {parent} is not writable")


def _without_path(message: str, path: Path) -> str:
    return message.removeprefix(f"{path}: ")
