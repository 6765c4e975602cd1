"""Checkpoints in the durable tier: which exist, back into host memory, and retention."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from gemini_run.durable import layout
from gemini_run.durable.layout import Marker, Place, RankRecord
from gemini_run.durable.tier import DurableTier, ObjectMissing, run_parallel
from gemini_run.errors import DurableError, FormatVersionError, ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, build_header
from gemini_run.memory.header import layout as slot_layout
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Item, Manifest
from gemini_run.terminal import say

READ_THREADS = 4
SPAN_BYTES = 16 << 20  #: small items that lie together are fetched together, up to so many bytes
GAP_BYTES = 64 << 10  #: reading over so many useless bytes is cheaper than another request
_DIGEST_CHUNK = 16 << 20


def committed(tier: DurableTier) -> list[int]:
    """Iterations that have a commit marker, newest first. Raises: DurableError."""
    names = (layout.split(name) for name in tier.list(layout.ITERATION_PREFIX))
    return sorted((n[0] for n in names if n and n[1] == layout.MARKER), reverse=True)


def newest_committed(tier: DurableTier, below: int | None = None) -> int | None:
    """The newest iteration whose marker is sound and whose files are all there with their sizes.

    One that is not is passed over, with a line on the terminal.

    Args:
        below: only look at older iterations than this (the next choice where one turned out corrupt).

    Raises:
        DurableError: the tier cannot be read.
        FormatVersionError: the newest was written in a format that this release does not know. Going back
            behind it in silence would throw work away.
    """
    for iteration in committed(tier):
        if below is not None and iteration >= below:
            continue
        try:
            read_marker(tier, iteration)
        except FormatVersionError:
            raise
        except (ReplicaCorrupt, ObjectMissing) as error:
            say(f"durable checkpoint of iteration {iteration} refused: {error}")
            continue
        return iteration
    return None


def read_marker(tier: DurableTier, iteration: int) -> Marker:
    """The marker, checked against what is there (existence and sizes, not content).

    Raises:
        ObjectMissing: the iteration is not committed.
        ReplicaCorrupt: the marker is unreadable, or a file is missing or of another size.
        FormatVersionError: the marker's version is unknown.
        DurableError: the tier cannot be read.
    """
    folder = layout.folder(iteration)
    try:
        marker = Marker.from_json(tier.get_bytes(folder + layout.MARKER))
    except ReplicaCorrupt as error:
        raise type(error)(f"{tier.location}/{folder}: {error}") from error
    if marker.iteration != iteration:
        raise ReplicaCorrupt(f"{tier.location}/{folder}: its marker is of iteration {marker.iteration}")
    present = tier.list(folder)
    for name, file in marker.files.items():
        size = present.get(folder + name)
        if size != file.size:
            found = "is missing" if size is None else f"has {size} of {file.size} bytes"
            raise ReplicaCorrupt(f"{tier.location}/{folder}{name} {found}")
    return marker


def verify(tier: DurableTier, iteration: int) -> Marker:
    """`read_marker`, and every byte of every file against its checksum. Reads everything."""
    marker = read_marker(tier, iteration)
    buffer = memoryview(bytearray(_DIGEST_CHUNK))
    for name, file in marker.files.items():
        digest = xxhash.xxh3_64()
        for offset in range(0, file.size, _DIGEST_CHUNK):
            part = buffer[: min(_DIGEST_CHUNK, file.size - offset)]
            tier.read_into(layout.folder(iteration) + name, offset, part)
            digest.update(part)
        if digest.hexdigest() != file.xxh3:
            raise ReplicaCorrupt(f"{tier.location}/{layout.folder(iteration)}{name} fails its checksum")
    return marker


def read_record(tier: DurableTier, iteration: int, rank: int) -> RankRecord:
    """Manifest, objects and checksums of one rank. Raises: ObjectMissing, ReplicaCorrupt, DurableError."""
    name = layout.folder(iteration) + layout.rank_file(rank)
    record = RankRecord.from_json(tier.get_bytes(name))
    if (record.rank, record.iteration) != (rank, iteration):
        raise ReplicaCorrupt(f"{tier.location}/{name} is of rank {record.rank}, iteration {record.iteration}")
    return record


def materialise(tier: DurableTier, iteration: int, owner: int, world_size: int, memory: NodeMemory, round: int) -> Path:
    """Rebuild the slot of `owner` at `iteration` in host memory, to the byte as it was captured.

    The slot is torn until all is there and verified; then complete and sealed. A sound slot of the same
    iteration is not touched, nor one that is held.

    Args:
        owner: global rank.
        world_size: of the job now.
        round: written into the slot's header.

    Returns: the slot's file.

    Raises:
        ObjectMissing: the iteration is not committed.
        ReplicaCorrupt: something in it fails its checksum; the message names it.
        DurableError: the tier cannot be read, or the checkpoint is of a world of another size.
        MemoryFull: no room for the slot.
    """
    marker = read_marker(tier, iteration)
    if marker.world_size != world_size:
        raise DurableError(
            f"{tier.location}: the checkpoint of iteration {iteration} is of {marker.world_size} ranks, "
            f"this job has {world_size}: start it with {marker.world_size}, or name an empty --durable"
        )
    record = read_record(tier, iteration, owner)
    places = layout.read_index(tier.get_bytes(layout.folder(iteration) + layout.INDEX))
    manifest = Manifest.from_json(record.manifest)
    header = build_header(
        manifest_text=record.manifest, num_items=len(manifest.items), payload_length=manifest.payload_length,
        objects=record.objects, round=round, iteration=iteration, owner=owner, world_size=world_size,
    )  # fmt: skip
    slot = _open_slot(memory.free_slot_path(owner, iteration), header.end)
    try:
        slot.begin()
        _, _, payload_offset, _ = slot_layout(len(record.manifest), len(manifest.items), header.payload_length)
        slot.view[HEADER_BYTES : HEADER_BYTES + len(record.manifest)] = record.manifest
        end = header.objects_offset + header.objects_length
        slot.view[header.objects_offset : end] = record.objects
        payload = slot.view[payload_offset : payload_offset + header.payload_length]
        jobs = list(_fetches(tier, iteration, manifest, record.entries, places, payload))
        run_parallel(jobs, READ_THREADS)
        jobs.clear()
        for item, want in zip(manifest.items, record.checksums, strict=True):
            if xxhash.xxh3_64_intdigest(payload[item.offset : item.offset + item.length]) != want:
                raise ReplicaCorrupt(
                    f"{tier.location}: iteration {iteration}, rank {owner}: tensor {item.name!r} fails its checksum"
                )
        payload.release()
        slot.commit(header)
        slot.seal(manifest, header)
    finally:
        slot.unlock()
        with contextlib.suppress(BufferError):  # a view lives on in a traceback: unmapped when that goes
            slot.close()
    return slot.path


def prune(tier: DurableTier, keep: int, newest: int | None = None) -> list[int]:
    """Remove all committed iterations but the newest `keep`, each one's marker first. Only after a commit.

    Args:
        newest: leave later iterations alone and do not count them: the job went back behind them (they could
            not be used), so they must not push out what it stores now.

    Returns: the iterations removed. Raises: DurableError.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: the newest checkpoint is never removed")
    surplus = [i for i in committed(tier) if newest is None or i <= newest][keep:]
    for iteration in surplus:
        remove(tier, iteration)
    return surplus


def remove_partial(tier: DurableTier) -> list[int]:
    """Remove what uploads that never committed left. None may be in flight. Raises: DurableError."""
    tier.clean(layout.ITERATION_PREFIX)
    names = [split for name in tier.list(layout.ITERATION_PREFIX) if (split := layout.split(name))]
    whole = {iteration for iteration, file in names if file == layout.MARKER}
    partial = sorted({iteration for iteration, _ in names} - whole)
    for iteration in partial:
        remove(tier, iteration)
    return partial


def remove(tier: DurableTier, iteration: int) -> None:
    """Remove all of one iteration, its marker first. None there is fine. Raises: DurableError."""
    folder = layout.folder(iteration)
    names = tier.list(folder)
    # The marker first: whatever happens on the way, no half of a checkpoint looks like one.
    tier.delete(sorted(names, key=lambda name: name != folder + layout.MARKER))


def _open_slot(path: Path, capacity: int) -> Slot:
    """The file at `path` if it is big enough and free, else a new one in its place; locked."""
    slot: Slot | None = None
    if path.exists():
        # Room for two copies is not a given, so memory that is there already is used again.
        try:
            slot = Slot(path, writable=True)
        except ReplicaCorrupt:
            pass  # shorter than a header: replaced
        if slot is not None and (slot.capacity < capacity or not slot.try_lock()):
            slot.close()
            slot = None
    if slot is None:
        slot = Slot.create(path, capacity)
        if not slot.try_lock():
            slot.close()
            raise DurableError(f"{path}: a writer holds the slot")
    return slot


@dataclasses.dataclass(frozen=True)
class _Wanted:
    place: Place
    item: Item


def _fetches(
    tier: DurableTier, iteration: int, manifest: Manifest, entries: list[int | None], places: list[Place],
    payload: memoryview,
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """Jobs that together fill `payload`."""
    wanted = []
    for item, entry in zip(manifest.items, entries, strict=True):
        if not item.length:
            continue
        if entry is None or entry >= len(places) or places[entry].raw_length != item.length:
            raise ReplicaCorrupt(f"{tier.location}: iteration {iteration}: no bytes stored for tensor {item.name!r}")
        wanted.append(_Wanted(places[entry], item))
    wanted.sort(key=lambda w: (w.place.file, w.place.raw_offset))
    span: list[_Wanted] = []
    for want in wanted:
        if span and not _joins(span, want):
            yield functools.partial(_fetch, tier, layout.folder(iteration), span, payload)
            span = []
        span.append(want)
    if span:
        yield functools.partial(_fetch, tier, layout.folder(iteration), span, payload)


def _joins(span: list[_Wanted], want: _Wanted) -> bool:
    first, last = span[0].place, span[-1].place
    return (
        want.place.file == last.file
        and want.place.raw_offset - (last.raw_offset + last.raw_length) <= GAP_BYTES
        and want.place.raw_offset + want.place.raw_length - first.raw_offset <= SPAN_BYTES
    )


def _fetch(tier: DurableTier, folder: str, span: list[_Wanted], payload: memoryview) -> None:
    name, start = folder + span[0].place.file, span[0].place.raw_offset
    if len(span) == 1:
        item = span[0].item
        with payload[item.offset : item.offset + item.length] as target:
            tier.read_into(name, start, target)
        return
    end = max(w.place.raw_offset + w.place.raw_length for w in span)
    data = memoryview(tier.get_range(name, start, end - start))
    for want in span:
        at = want.place.raw_offset - start
        payload[want.item.offset : want.item.offset + want.item.length] = data[at : at + want.item.length]
