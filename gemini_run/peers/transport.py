"""One exchange of replicas: send this rank's slot to its peers, receive theirs into slots of this node.

In five steps, all ranks at once: the header pages; whether the receiver has room; manifest (if it is new) and
checksums; which tensors the receiver wants; those. What the receiver's own slot holds alike, by name, length and
checksum, the replica borrows from there: of state that data parallelism replicates nothing is sent, and nothing copied.
The receiver checks what arrived and commits the replica: sequence number last. Bytes travel as bytes (gloo knows few
dtypes), in chunks with a window of transfers posted; `peers.pace` holds back those that would be in training's way.

The iteration that a round goes on from is exchanged as well, with whoever does not hold it yet (`Exchange.renew`).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch

from gemini_run.errors import MemoryFull, PeerLost, ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, SlotHeader
from gemini_run.memory.settle import fill
from gemini_run.memory.slots import Slot
from gemini_run.peers.group import Peers
from gemini_run.peers.pace import Pace
from gemini_run.peers.replicas import ReplicaSlots
from gemini_run.peers.streams import FIRST_CHUNK_TAG, OBJECTS_TAG, Span, at_once, held_back, posts, view
from gemini_run.plan.manifest import Manifest
from gemini_run.wire import MemoryPaths

CHUNK_BYTES = 8 * 2**20  #: where nothing is held back
GAP_BYTES = 64 * 2**10  #: tensors nobody wants between two that are wanted go along if they are no larger
WINDOW = 4  #: transfers posted at once, per direction and peer
_HEADER_TAG, _ROOM_TAG, _MANIFEST_TAG, _CHECKSUMS_TAG, _WANTED_TAG, _PROBE_TAG, _CHUNK_TAG = range(1, 8)
assert _CHUNK_TAG < OBJECTS_TAG < FIRST_CHUNK_TAG
_PROBES = 5

Flags = npt.NDArray[np.uint8]  #: one a tensor, in manifest order
_Pages = dict[int, SlotHeader | None]  #: source -> its header, None: it has no slot this time


@dataclasses.dataclass(frozen=True)
class Own:
    """The slot that this rank sends, sealed."""

    slot: Slot
    header: SlotHeader
    manifest: Manifest

    @functools.cached_property
    def checksums(self) -> npt.NDArray[np.uint64]:
        return np.array(self.slot.stored_checksums(self.header), np.uint64)

    @functools.cached_property
    def lenders(self) -> npt.NDArray[np.int64]:
        return np.array(self.slot.lenders(self.header), np.int64)


@dataclasses.dataclass
class Incoming:
    """One peer's shard on its way into a replica slot of this node.

    Attributes:
        source: group rank.
        index: of the slot among its owner's.
        wanted: which tensors are sent; the others are borrowed from a slot of this node's own ranks.
        lenders: of each tensor the owner of that slot, -1 = it is sent.
        chunk: bytes of its chunks.
        paced: its sender may hold them back.
    """

    source: int
    header: SlotHeader
    index: int
    slot: Slot
    manifest: Manifest | None = None
    checksums: npt.NDArray[np.uint64] = dataclasses.field(default_factory=lambda: np.empty(0, np.uint64))
    wanted: Flags = dataclasses.field(default_factory=lambda: np.empty(0, np.uint8))
    lenders: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    chunk: int = CHUNK_BYTES
    paced: bool = False


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one exchange came to.

    Attributes:
        bytes: received.
        void: a replica is missing: a peer has no whole slot of its own this time, or there is no room for it here.
        full: why there is no room here.
    """

    bytes: int
    void: bool
    full: MemoryFull | None = None


class Exchange:
    """Replica traffic of one rank over one checkpoint process group. Runs on the commit thread."""

    def __init__(
        self, peers: Peers, paths: MemoryPaths, *, round: int, timeout: timedelta, pace: Pace | None = None
    ) -> None:
        """Args: pace: when this rank's chunks go; None: at once."""
        self._peers = peers
        self._pace = pace
        self._held_chunk: int | None = None  # of the exchange that runs: bytes of the chunks that wait at the gate
        self._probed = False
        self._round = round
        self._timeout = timeout
        self._replicas = {source: ReplicaSlots(paths, owner) for source, owner in peers.receives.items()}
        self._header_out = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        # Both ends of a pair remember the manifest that went between them, so both know when it is not sent again.
        self._sent: dict[int, int] = {}  # target -> its checksum
        self._received: dict[int, tuple[int, bytes, Manifest]] = {}  # source -> checksum, text, parsed
        self._twins: dict[int, _Twins] = {}

    def run(self, own: Own | None, iteration: int, *, keep: int) -> Traffic:
        """Send this rank's slot of `iteration`, get every peer's of the same.

        Args:
            own: None if this rank has none this time.
            keep: the newest committed iteration; replicas of it are not touched.

        Raises:
            PeerLost: a peer died, or did not move within the timeout.
            ReplicaCorrupt: what arrived is not what was announced, or fails a checksum.
        """
        try:
            theirs = self._headers(own, iteration, lambda round: round == self._round)
            return self._replicate(own, theirs, dict.fromkeys(theirs, keep))
        except RuntimeError as error:
            raise PeerLost(f"a peer's memory is out of reach: {_first_line(error)}") from error

    def renew(self, own: Own) -> Traffic:
        """`run` for the iteration that this round went on from: complete on its own node, and maybe nowhere else.

        A peer that holds it already is sent nothing. Of the others the newest replica is not touched: should a node
        be lost meanwhile, that one is what all can still go back to.
        """
        try:
            theirs = self._headers(own, own.header.iteration, lambda round: round <= self._round)
            newest = {source: self._replicas[source].newest() for source in theirs}
            missing = {s: page for s, page in theirs.items() if page is None or not _same(newest[s], page)}
            keep = {source: kept.iteration if (kept := newest[source]) else -1 for source in missing}
            return self._replicate(own, missing, keep)
        except RuntimeError as error:
            raise PeerLost(f"a peer's memory is out of reach: {_first_line(error)}") from error

    def _replicate(self, own: Own | None, theirs: _Pages, keep: Mapping[int, int]) -> Traffic:
        """Receive from the sources of `theirs`, into slots without their iteration of `keep`; send to who lacks it."""
        incoming: list[Incoming] = []
        whole = {source: page for source, page in theirs.items() if page is not None}
        full: MemoryFull | None = None
        try:
            for source, page in whole.items():
                try:
                    index, target = self._replicas[source].writable(keep[source], page.end, page.world_size)
                except MemoryFull as error:
                    full = error
                else:
                    incoming.append(Incoming(source, page, index, target))
            asked = self._asked_by({entry.source for entry in incoming})
            targets = asked if own is not None else []
            self._fronts(own, targets, incoming)
            for entry in incoming:
                self._choose(entry, own)
            wanted = self._wanted(own, targets, incoming)
            if own is not None:
                for flags in wanted.values():
                    borrowed = np.flatnonzero((flags != 0) & (own.lenders >= 0))
                    fill(own.slot, own.header, own.manifest, borrowed.tolist())
            self._bodies(own, wanted, incoming)
            for entry in incoming:
                _accept(entry)
        except BaseException:
            for entry in incoming:
                self._replicas[entry.source].abandon(entry.index)
            raise
        if own is not None:
            self._sent.update(dict.fromkeys(targets, own.header.manifest_checksum))
        for entry in incoming:
            self._replicas[entry.source].done(entry.index, entry.header.iteration)
        return Traffic(sum(_bytes_of(entry) for entry in incoming), len(incoming) < len(theirs), full)

    # --- the steps ------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Measure what a transfer of one byte takes: in the first exchange, which all members enter alike."""
        self._probed = True
        took = []
        for _ in range(_PROBES):
            started = time.perf_counter()
            self._swap(
                [(source, torch.empty(1, dtype=torch.uint8), _PROBE_TAG) for source in self._peers.receives],
                [(target, torch.zeros(1, dtype=torch.uint8), _PROBE_TAG) for target in self._peers.sends],
            )
            took.append(time.perf_counter() - started)
        if self._pace is not None:
            self._pace.started_up(min(took))

    def _headers(self, own: Own | None, iteration: int, of_round: Callable[[int], bool]) -> _Pages:
        if not self._probed:
            self._probe()
        packed = bytearray((own.header.pack() if own is not None else b"").ljust(HEADER_BYTES, b"\0"))
        self._header_out.copy_(torch.frombuffer(packed, dtype=torch.uint8))
        pages = {source: torch.empty(HEADER_BYTES, dtype=torch.uint8) for source in self._peers.receives}
        self._swap(
            [(source, page, _HEADER_TAG) for source, page in pages.items()],
            [(target, self._header_out, _HEADER_TAG) for target in self._peers.sends],
        )
        result: dict[int, SlotHeader | None] = {}
        for source, page in pages.items():
            if not page.any():
                result[source] = None
                continue
            theirs = SlotHeader.unpack(bytes(page.numpy()))
            expected = (iteration, self._peers.receives[source])
            if (theirs.iteration, theirs.owner) != expected or not of_round(theirs.round):
                raise ReplicaCorrupt(
                    f"a peer sent round {theirs.round}, iteration {theirs.iteration} of rank {theirs.owner} in round "
                    f"{self._round}; expected iteration {expected[0]} of rank {expected[1]}"
                )
            if not theirs.sealed:
                raise ReplicaCorrupt("a peer sent a slot without checksums")
            result[source] = dataclasses.replace(theirs, flags=0, borrowed=0)
        return result

    def _asked_by(self, asked: set[int]) -> list[int]:
        """Tell each source whether its slot is `asked` for here; returns the targets that ask for this rank's."""
        mine = {source: torch.tensor([source in asked], dtype=torch.uint8) for source in self._peers.receives}
        answers = {target: torch.empty(1, dtype=torch.uint8) for target in self._peers.sends}
        self._swap(
            [(target, answer, _ROOM_TAG) for target, answer in answers.items()],
            [(source, flag, _ROOM_TAG) for source, flag in mine.items()],
        )
        return [target for target, answer in answers.items() if answer.item()]

    def _fronts(self, own: Own | None, targets: Sequence[int], incoming: Sequence[Incoming]) -> None:
        self._held_chunk = self._pace.chunk_bytes if self._pace is not None else None
        told = torch.tensor([self._held_chunk or CHUNK_BYTES, self._held_chunk is not None]).view(torch.uint8)
        heard = {entry.source: torch.empty_like(told) for entry in incoming}
        receives = [(source, data, _CHUNK_TAG) for source, data in heard.items()]
        sends = [(target, told, _CHUNK_TAG) for target in targets]
        for entry in incoming:
            theirs, known = entry.header, self._received.get(entry.source)
            if known is None or known[0] != theirs.manifest_checksum:
                text = view(entry.slot, theirs.manifest_offset, theirs.manifest_length)
                receives.append((entry.source, text, _MANIFEST_TAG))
            table = view(entry.slot, theirs.checksums_offset, 8 * theirs.num_items)
            receives.append((entry.source, table, _CHECKSUMS_TAG))
        if own is not None:
            header = own.header
            for target in targets:
                if self._sent.get(target) != header.manifest_checksum:
                    text = view(own.slot, header.manifest_offset, header.manifest_length)
                    sends.append((target, text, _MANIFEST_TAG))
                sends.append((target, view(own.slot, header.checksums_offset, 8 * header.num_items), _CHECKSUMS_TAG))
        self._swap(receives, sends)
        for entry in incoming:
            chunk, paced = heard[entry.source].view(torch.int64).tolist()
            if chunk < 1:
                raise ReplicaCorrupt(f"a peer sends chunks of {chunk} bytes")
            entry.chunk, entry.paced = chunk, bool(paced)
            theirs, known = entry.header, self._received.get(entry.source)
            if known is None or known[0] != theirs.manifest_checksum:
                parsed = entry.slot.manifest(theirs)
                start = theirs.manifest_offset
                text_bytes = bytes(entry.slot.view[start : start + theirs.manifest_length])
                known = self._received[entry.source] = (theirs.manifest_checksum, text_bytes, parsed)
                self._twins.pop(entry.source, None)
            else:
                start = theirs.manifest_offset
                entry.slot.view[start : start + theirs.manifest_length] = known[1]
            entry.manifest = known[2]
            entry.checksums = np.array(entry.slot.stored_checksums(theirs), np.uint64)

    def _choose(self, entry: Incoming, own: Own | None) -> None:
        """Want what this rank's own slot does not hold alike; the rest is borrowed from it, or from its own lender."""
        assert entry.manifest is not None, "received before"
        entry.wanted = np.ones(len(entry.manifest.items), np.uint8)
        entry.lenders = np.full(len(entry.manifest.items), -1, np.int64)
        if own is None:
            return
        twins = self._twins.get(entry.source)
        if twins is None or twins.mine is not own.manifest:
            twins = self._twins[entry.source] = _Twins.of(entry.manifest, own.manifest)
        alike = own.checksums[twins.ours] == entry.checksums[twins.theirs]
        entry.wanted[twins.theirs[alike]] = 0
        mine = own.lenders[twins.ours[alike]]
        entry.lenders[twins.theirs[alike]] = np.where(mine >= 0, mine, own.header.owner)

    def _wanted(self, own: Own | None, targets: Sequence[int], incoming: Sequence[Incoming]) -> dict[int, Flags]:
        """Target -> which tensors of this rank's it wants."""
        num_items = own.header.num_items if own is not None else 0
        answers = {target: torch.empty(num_items, dtype=torch.uint8) for target in targets}
        self._swap(
            [(target, answer, _WANTED_TAG) for target, answer in answers.items()],
            [(entry.source, torch.from_numpy(entry.wanted), _WANTED_TAG) for entry in incoming],
        )
        return {target: answer.numpy() for target, answer in answers.items()}

    def _bodies(self, own: Own | None, wanted: dict[int, Flags], incoming: Sequence[Incoming]) -> None:
        pace, group, held = self._pace, self._peers.group, self._held_chunk
        hold = pace.gate.wait if pace is not None and held is not None else None
        sends, most = [], 0
        if own is not None:
            parts = {target: spans(own.manifest, flags) for target, flags in wanted.items()}
            chunk = held or CHUNK_BYTES
            sends = [posts(group.send, own.slot, own.header, p, target, chunk, hold) for target, p in parts.items()]
            most = max((sum(end - start for start, end in p) for p in parts.values()), default=0)
        receives = []
        for entry in incoming:
            assert entry.manifest is not None, "received before"
            theirs = spans(entry.manifest, entry.wanted)
            receives.append(posts(group.recv, entry.slot, entry.header, theirs, entry.source, entry.chunk))
        if hold is not None or any(entry.paced for entry in incoming):
            held_back(sends, receives, pace.window if pace is not None else WINDOW, self._timeout)
        else:
            arrived = at_once(sends, receives, WINDOW, self._timeout)
            if pace is not None:
                pace.arrived(arrived)
        if pace is not None:
            pace.sent(most, len(sends))

    def _swap(
        self, receives: Sequence[tuple[int, torch.Tensor, int]], sends: Sequence[tuple[int, torch.Tensor, int]]
    ) -> None:
        """Post all and wait for all. Each: (group rank, bytes, tag)."""
        group = self._peers.group
        works = [group.recv([data], rank, tag) for rank, data, tag in receives if len(data)]
        works += [group.send([data], rank, tag) for rank, data, tag in sends if len(data)]
        for work in works:
            work.wait(self._timeout)


class _Twins:
    """Tensors of one name and length in two ranks' manifests: what may be alike.

    Attributes:
        theirs, ours: their indices in either manifest, in the order of the peer's.
        mine: this rank's manifest.
    """

    def __init__(self, mine: Manifest, pairs: Sequence[tuple[int, int]]) -> None:
        self.mine = mine
        self.theirs = np.array([pair[0] for pair in pairs], np.intp)
        self.ours = np.array([pair[1] for pair in pairs], np.intp)

    @classmethod
    def of(cls, theirs: Manifest, mine: Manifest) -> _Twins:
        known = {item.name: index for index, item in enumerate(mine.items)}
        pairs = []
        for index, item in enumerate(theirs.items):
            our = known.get(item.name)
            if our is not None and mine.items[our].length == item.length:
                pairs.append((index, our))
        return cls(mine, pairs)


def spans(manifest: Manifest, wanted: Flags) -> list[Span]:
    """The parts of the payload to send, in order; both ends compute the same."""
    found: list[Span] = []
    for item, flag in zip(manifest.items, wanted, strict=True):
        if not flag or not item.length:
            continue
        start, end = item.offset, item.offset + item.length
        if found and 0 <= start - found[-1][1] <= GAP_BYTES:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _accept(entry: Incoming) -> None:
    """Check what arrived against the header that announced it, then commit it. What is borrowed is as in this rank's
    own slot, whose checksums are known."""
    assert entry.manifest is not None, "received before"
    entry.slot.objects(entry.header)
    entry.slot.verify_items(entry.manifest, entry.header, np.flatnonzero(entry.wanted).tolist())
    entry.slot.commit(entry.slot.write_lenders(entry.header, entry.lenders.tolist()))


def _bytes_of(entry: Incoming) -> int:
    assert entry.manifest is not None, "received before"
    return sum(end - start for start, end in spans(entry.manifest, entry.wanted)) + entry.header.objects_length


def _same(held: SlotHeader | None, theirs: SlotHeader) -> bool:
    """Whether the replica `held` is that very slot: one writer, one iteration, the same bytes."""
    if held is None or not held.sealed:
        return False
    return dataclasses.replace(held, flags=0, sequence=theirs.sequence, borrowed=theirs.borrowed) == theirs


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
