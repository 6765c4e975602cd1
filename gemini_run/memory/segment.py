"""A node's host memory: the directory that is the node's identity, and its slots."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import shutil
import socket
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gemini_run.errors import FormatVersionError, MemoryFull, ReplicaCorrupt
from gemini_run.ids import NodeId, new_node_id
from gemini_run.memory.header import HEADER_BYTES, SlotHeader
from gemini_run.memory.reserve import keep_back, write_json
from gemini_run.wire import DEFAULT_MEMORY_BASE, MemoryPaths, memory_root, run_memory

NODE_FORMAT_VERSION = 1
SLOTS_PER_REPLICA = 2  #: the newest complete one, and the one that is being written
_CLAIM_ATTEMPTS = 100


@dataclasses.dataclass(frozen=True)
class SlotInfo:
    """One slot file as found on disk.

    Attributes:
        problem: why it cannot be used, else None.
        torn: it holds nothing yet, or its writer died before the commit: no damage, and common.
        unknown_version: it may well be good, for the release that wrote it.
    """

    path: Path
    header: SlotHeader | None
    problem: str | None
    torn: bool = False
    unknown_version: bool = False

    @property
    def usable(self) -> bool:
        return self.problem is None and self.header is not None


class NodeMemory:
    """The memory directory of one node, held by its agent through a file lock.

    Attributes:
        node_id: made with the directory, kept in it.
        paths: its file names.
        adopted: True if the directory was left by an earlier agent of this run on this node.
    """

    def __init__(self, paths: MemoryPaths, node_id: NodeId, lock: int, *, adopted: bool) -> None:
        self.paths = paths
        self.node_id = node_id
        self.adopted = adopted
        self._lock = lock

    @classmethod
    def claim(cls, run_id: str, base: Path = DEFAULT_MEMORY_BASE) -> NodeMemory:
        """Take over the first directory of this run whose agent is gone, else make a new one.

        Several agents may run on one host (each then has its own directory).

        Raises:
            OSError: `base` cannot be written.
            MemoryFull: there is no room for the notes of a node.
        """
        for _ in range(_CLAIM_ATTEMPTS):
            try:
                return cls._claim(run_id, base)
            except FileNotFoundError:
                continue  # a run that ended just now removed the folder above, which was empty for a moment
        return cls._claim(run_id, base)

    @classmethod
    def _claim(cls, run_id: str, base: Path) -> NodeMemory:
        root = run_memory(run_id, base)
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        for candidate in sorted(p for p in root.iterdir() if not p.name.startswith(".")):
            paths = MemoryPaths(candidate)
            lock = _try_lock(paths.lock, create=False)
            if lock is None:
                continue
            node = _read_node(paths)
            if node is not None:
                return cls(paths, NodeId(node["node_id"]), lock, adopted=True)
            os.close(lock)  # of an unknown version or half made: leave it alone
        node_id = new_node_id(socket.gethostname())
        # Made under a name that nobody looks at, so that another agent never finds it half made or unlocked.
        hidden = MemoryPaths(root / f".{node_id}")
        for directory in (hidden.root, hidden.slots, hidden.beacons):
            directory.mkdir(mode=0o700)
        fresh = _try_lock(hidden.lock, create=True)
        if fresh is None:
            raise RuntimeError(f"{hidden.lock}: a directory just made is locked already")
        try:
            keep_back(hidden)
            write_json(hidden, hidden.node_json, {"version": NODE_FORMAT_VERSION, "node_id": node_id, "notes": {}})
        except MemoryFull:
            cls(hidden, node_id, fresh, adopted=False).release(remove=True)
            raise
        paths = MemoryPaths(root / node_id)
        os.rename(hidden.root, paths.root)
        return cls(paths, node_id, fresh, adopted=False)

    def notes(self) -> dict[str, Any]:
        """What earlier rounds of this node left for later ones (node rank, history), JSON values."""
        node = _read_node(self.paths)
        notes: dict[str, Any] = node["notes"] if node else {}
        return notes

    def save_notes(self, notes: dict[str, Any]) -> None:
        """Raises: MemoryFull."""
        write_json(
            self.paths, self.paths.node_json, {"version": NODE_FORMAT_VERSION, "node_id": self.node_id, "notes": notes}
        )

    def scan(self) -> list[SlotInfo]:
        return scan_slots(self.paths)

    def find(self, owner: int, iteration: int, world_size: int | None = None) -> SlotInfo | None:
        """The usable slot of `owner` at `iteration`, if it is here.

        Args:
            world_size: only one of a world of so many ranks.
        """
        for info in self.scan():
            header = info.header
            if not header or not info.usable or (header.owner, header.iteration) != (owner, iteration):
                continue
            if world_size is None or header.world_size == world_size:
                return info
        return None

    def free_slot_path(self, owner: int, keep: int) -> Path:
        """A slot path of `owner` to write into: not one that holds iteration `keep` or is held.

        Rather one with nothing usable in it, or a second one, than one of an older iteration: should this write not
        come to its end, that may be the newest which is left.
        """
        usable = {info.path: info.header for info in self.scan() if info.usable and info.header}
        older: list[tuple[int, Path]] = []
        for index in itertools.count():
            path = self.paths.slot(owner, index)
            header = usable.get(path)
            if header is None:
                if path.exists() or index < SLOTS_PER_REPLICA or not older:
                    return path
                break
            if header.iteration != keep and not header.hold:
                older.append((header.iteration, path))
        return min(older)[1]

    def release(self, *, remove: bool) -> None:
        """Give the directory up; `remove` also deletes it (a finished run). Idempotent."""
        if self._lock < 0:
            return
        if remove:
            shutil.rmtree(self.paths.root, ignore_errors=True)
            for parent in (self.paths.root.parent, self.paths.root.parent.parent):
                with contextlib.suppress(OSError):  # other nodes or runs still live there
                    parent.rmdir()
        os.close(self._lock)
        self._lock = -1


def scan_slots(paths: MemoryPaths) -> list[SlotInfo]:
    """Every slot file of a node, by header only (the payload is not read)."""
    return scan_folder(paths.slots)


def scan_folder(folder: Path) -> list[SlotInfo]:
    """As `scan_slots`, of any folder with slot files."""
    infos = []
    try:
        entries = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except FileNotFoundError:
        return []
    for path in entries:
        header: SlotHeader | None = None
        torn = unknown_version = False
        try:
            with path.open("rb") as file:
                page = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
            if not any(page):
                infos.append(SlotInfo(path, None, "empty: nothing was written to it yet", torn=True))
                continue
            header = SlotHeader.unpack(page)
            torn = not header.complete
            problem = "torn: its writer died before the commit" if torn else None
            if problem is None and header.end > size:
                problem = f"truncated: {size} of {header.end} bytes"
        except FileNotFoundError:
            continue
        except ReplicaCorrupt as error:
            problem = str(error)
            unknown_version = isinstance(error, FormatVersionError)
        infos.append(SlotInfo(path, header, problem, torn, unknown_version))
    return infos


def occupied_bytes(paths: MemoryPaths) -> int:
    """Sizes of a node's slot files together. Other ranks of the node may make and remake theirs meanwhile."""
    total = 0
    try:
        files = list(paths.slots.iterdir())
    except FileNotFoundError:
        return 0
    for path in files:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # remade in another size just now
    return total


def node_directories(run_id: str, base: Path = DEFAULT_MEMORY_BASE) -> list[MemoryPaths]:
    """The memory directories of a run on this machine, living agents or not. For readers."""
    root = run_memory(run_id, base)
    try:
        found = sorted(p for p in root.iterdir() if not p.name.startswith("."))
        return [MemoryPaths(p) for p in found if (p / "node.json").exists()]
    except FileNotFoundError:
        return []


def remove_surplus(paths: MemoryPaths, written: Collection[int]) -> None:
    """Remove the slots that nobody here writes any more (of another world, of another placement), but for those that
    the durable tier reads. To be called once an iteration of this round is committed.

    Args:
        written: owners whose slots workers of this node write now. A writer may have any of their files mapped: they
            are left for it to write over.
    """
    for info in scan_slots(paths):
        header = info.header
        if header is None or header.owner in written:
            continue
        if not (info.usable and header.hold):
            info.path.unlink(missing_ok=True)


def durable_refused(paths: MemoryPaths) -> list[int]:
    """Iterations of the durable tier that workers of this node found damaged."""
    try:
        found = json.loads(paths.durable_refused.read_text())
    except (OSError, ValueError):
        return []  # none
    return [iteration for iteration in found if isinstance(iteration, int)] if isinstance(found, list) else []


def refuse_durable(paths: MemoryPaths, iteration: int) -> None:
    """Tell this node's agent not to take that one again."""
    write_json(paths, paths.durable_refused, sorted({*durable_refused(paths), iteration}))


def ended_runs(base: Path = DEFAULT_MEMORY_BASE) -> list[tuple[Path, int]]:
    """(directory, bytes) of each run whose agents on this machine are all gone and whose memory is kept."""
    found = []
    try:
        runs = sorted(memory_root(base).iterdir())
    except FileNotFoundError:
        return []
    for run in runs:
        try:
            nodes = [MemoryPaths(path) for path in run.iterdir() if (path / "node.json").exists()]
        except (FileNotFoundError, NotADirectoryError):
            continue
        if nodes and not any(agent_alive(node) for node in nodes):
            found.append((run, sum(occupied_bytes(node) for node in nodes)))
    return found


def agent_alive(paths: MemoryPaths) -> bool:
    """Whether an agent holds this directory now. Only asks: the lock is not touched, so an agent that claims the
    directory at this very moment is not disturbed."""
    try:
        lock = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
    finally:
        os.close(lock)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


#: struct flock: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")


def _whole_file(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _try_lock(path: Path, *, create: bool) -> int | None:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # Of the open file, as flock()'s are, so no close() of another descriptor drops it; and unlike flock()'s
        # it can be asked about without being taken (`agent_alive`).
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        os.close(lock)
        return None
    return lock


def _read_node(paths: MemoryPaths) -> dict[str, Any] | None:
    """node.json; None where it is missing, unreadable, or of a version that this release does not know."""
    try:
        node = json.loads(paths.node_json.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(node, dict) or node.get("version") != NODE_FORMAT_VERSION:
        return None
    return node if isinstance(node.get("node_id"), str) and isinstance(node.get("notes"), dict) else None
