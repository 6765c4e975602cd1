"""One exchange of replicas: send this rank's slot to its peers, receive theirs into slots of this node.

Bytes travel as bytes (gloo knows few dtypes), in chunks with a window of transfers posted. The header page
goes first; the receiver checks every checksum, then commits its copy: sequence number last.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from gemini_run.errors import PeerLost, ReplicaCorrupt
from gemini_run.memory.slots import HEADER_BYTES, Slot, SlotHeader
from gemini_run.peers.group import Peers
from gemini_run.wire import MemoryPaths

CHUNK_BYTES = 8 * 2**20
WINDOW = 4  #: transfers posted at once, per direction and peer
_HEADER_TAG = 1
_FIRST_CHUNK_TAG = 2


class ReplicaSlots:
    """The slots that hold one peer rank's shard on this node. Not thread-safe."""

    def __init__(self, paths: MemoryPaths, owner: int) -> None:
        self._paths = paths
        self.owner = owner
        self._slots: dict[int, Slot] = {}
        self._iterations: dict[int, int] = {}

    def writable(self, keep: int, capacity: int) -> tuple[int, Slot]:
        """A slot with room that does not hold iteration `keep`, locked and torn. Raises: MemoryFull."""
        index = 0
        while True:
            slot = self._slots.get(index) or self._open(index, capacity)
            if self._iterations.get(index) != keep and not slot.header_hold() and slot.try_lock():
                if slot.capacity < capacity:
                    slot.unlock()
                    slot = self._create(index, capacity)
                    slot.try_lock()
                slot.begin()
                self._iterations.pop(index, None)
                return index, slot
            index += 1

    def done(self, index: int, iteration: int) -> None:
        self._iterations[index] = iteration
        self._slots[index].unlock()

    def abandon(self, index: int) -> None:
        """The transfer failed: the slot stays torn."""
        self._slots[index].unlock()

    def _open(self, index: int, capacity: int) -> Slot:
        path = self._paths.slot(self.owner, index)
        if path.exists():
            slot = Slot(path, writable=True)
            if slot.capacity >= capacity:
                self._slots[index] = slot
                try:
                    header = slot.header()
                except ReplicaCorrupt:
                    return slot  # whatever it was, it is about to be overwritten
                if header.complete:
                    self._iterations[index] = header.iteration
                return slot
            slot.close()
        return self._create(index, capacity)

    def _create(self, index: int, capacity: int) -> Slot:
        path = self._paths.slot(self.owner, index)
        path.unlink(missing_ok=True)  # first, so that old and new never need room at the same time
        slot = self._slots[index] = Slot.create(path, capacity)
        return slot


class Exchange:
    """Replica traffic of one rank over one checkpoint process group. Runs on the commit thread."""

    def __init__(self, peers: Peers, paths: MemoryPaths, *, round: int, timeout: timedelta) -> None:
        self._peers = peers
        self._round = round
        self._timeout = timeout
        self._replicas = {source: ReplicaSlots(paths, owner) for source, owner in peers.receives.items()}
        self._header_out = torch.empty(HEADER_BYTES, dtype=torch.uint8)

    def run(self, slot: Slot, header: SlotHeader, *, keep: int) -> int:
        """Send the sealed `slot`, receive every peer's of the same iteration. Returns bytes received.

        Args:
            keep: the newest committed iteration; replicas of it are not touched.

        Raises:
            PeerLost: a peer died, or did not move within the timeout.
            ReplicaCorrupt: what arrived is not what was announced, or fails a checksum.
            MemoryFull: no room for a replica.
        """
        try:
            incoming = self._headers(slot, header)
        except RuntimeError as error:
            raise PeerLost(f"a peer's memory is out of reach: {_first_line(error)}") from error
        placed: list[tuple[int, SlotHeader, int, Slot]] = []
        try:
            for source, theirs in incoming.items():
                index, target = self._replicas[source].writable(keep, theirs.end)
                placed.append((source, theirs, index, target))
            try:
                self._bodies(slot, header, placed)
            except RuntimeError as error:
                raise PeerLost(f"a replica transfer broke off: {_first_line(error)}") from error
            for _, theirs, _, target in placed:
                _accept(target, theirs)
        except BaseException:
            for source, _, index, _ in placed:
                self._replicas[source].abandon(index)
            raise
        for source, theirs, index, _ in placed:
            self._replicas[source].done(index, theirs.iteration)
        return sum(theirs.end for _, theirs, _, _ in placed)

    def _headers(self, slot: Slot, header: SlotHeader) -> dict[int, SlotHeader]:
        group = self._peers.group
        self._header_out.copy_(torch.frombuffer(slot.view, dtype=torch.uint8, count=HEADER_BYTES))
        pages = {source: torch.empty(HEADER_BYTES, dtype=torch.uint8) for source in self._peers.receives}
        works = [group.recv([page], source, _HEADER_TAG) for source, page in pages.items()]
        works += [group.send([self._header_out], target, _HEADER_TAG) for target in self._peers.sends]
        for work in works:
            work.wait(self._timeout)
        result = {}
        for source, page in pages.items():
            theirs = SlotHeader.unpack(bytes(page.numpy()))
            expected = (self._round, header.iteration, self._peers.receives[source])
            if (theirs.round, theirs.iteration, theirs.owner) != expected:
                raise ReplicaCorrupt(
                    f"a peer sent round {theirs.round}, iteration {theirs.iteration} of rank {theirs.owner}; "
                    f"expected round {expected[0]}, iteration {expected[1]} of rank {expected[2]}"
                )
            result[source] = dataclasses.replace(theirs, flags=0)
        return result

    def _bodies(self, slot: Slot, header: SlotHeader, placed: list[tuple[int, SlotHeader, int, Slot]]) -> None:
        group = self._peers.group
        streams: list[Iterator[Any]] = []
        for target in self._peers.sends:
            streams.append(_posts(group.send, slot, header.end, target))
        for source, theirs, _, replica in placed:
            streams.append(_posts(group.recv, replica, theirs.end, source))
        windows: list[tuple[Iterator[Any], deque[Any]]] = [(stream, deque()) for stream in streams]
        while windows:
            for stream, posted in windows:
                while len(posted) < WINDOW and (work := next(stream, None)) is not None:
                    posted.append(work)
            windows = [(stream, posted) for stream, posted in windows if posted]
            for _, posted in windows:
                posted.popleft().wait(self._timeout)


def _posts(post: Any, slot: Slot, end: int, peer: int) -> Iterator[Any]:
    """Post the body of a slot chunk by chunk; each chunk has its own tag, so order is no concern."""
    for number, start in enumerate(range(HEADER_BYTES, end, CHUNK_BYTES)):
        length = min(CHUNK_BYTES, end - start)
        chunk = torch.frombuffer(slot.view, dtype=torch.uint8, count=length, offset=start)
        yield post([chunk], peer, _FIRST_CHUNK_TAG + number)


def _accept(slot: Slot, header: SlotHeader) -> None:
    """Check what arrived against the header that announced it, then commit it."""
    if not header.sealed:
        raise ReplicaCorrupt("a peer sent a slot without checksums")
    slot.verify(dataclasses.replace(header, sequence=1))
    slot.commit(header)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
