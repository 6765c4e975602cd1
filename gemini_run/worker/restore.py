"""Restore: this rank's slot, in this node's memory, back into the live objects. There is no other way."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Sequence

from gemini_run.errors import GeminiError, ReplicaCorrupt
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.settle import fill
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Manifest
from gemini_run.wire import MemoryPaths
from gemini_run.worker.arguments import RESERVED_NAMES
from gemini_run.worker.codec import unpack_objects
from gemini_run.worker.components import Component
from gemini_run.worker.loading import SlotReader


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was restored. `slot` stays mapped and becomes the rank's kept slot."""

    iteration: int
    slot: Slot
    manifest: Manifest
    index: int
    num_bytes: int
    seconds: float


def restore(components: Sequence[Component], paths: MemoryPaths, *, owner: int, iteration: int) -> Restored:
    """Load iteration `iteration` of rank `owner` from this node's memory, every checksum checked.

    Raises:
        ReplicaCorrupt: there is no such slot here, or it fails a check; it is marked refused. The live objects may be
            spoilt: this process must end.
        GeminiError: the live objects are not those that were saved.
    """
    started = time.perf_counter()
    slot, index = _open(paths, owner, iteration)
    try:
        header = slot.header()
        if header.borrowed:
            fill(slot, header, slot.manifest(header))
        header, manifest = slot.verify(payload=False)  # the tensors on their way
        saved, static, dynamic = unpack_objects(slot.objects(header))
        if saved != iteration:
            raise ReplicaCorrupt(f"{slot.path}: says iteration {iteration} and holds {saved}")
        check_names(components, static)
        with contextlib.closing(SlotReader(slot, header, manifest)) as reader:
            for component in components:  # generators come last: loading the others may draw from them
                component.restore(static[component.name], dynamic[component.name], reader)
            reader.finish()
    except ReplicaCorrupt:
        slot.refuse()
        raise
    for component in components:
        component.settle()
    return Restored(iteration, slot, manifest, index, header.payload_length, time.perf_counter() - started)


def check_names(components: Sequence[Component], saved: Iterable[str]) -> None:
    """Raises: GeminiError if the script gives other objects than were saved."""
    given, taken = _given(component.name for component in components), _given(saved)
    if given != taken:
        raise GeminiError(
            f"the checkpoint was taken with Checkpointer({', '.join(taken)}), the script now gives "
            f"({', '.join(given)}): give the same names"
        )


def _given(names: Iterable[str]) -> list[str]:
    """Those of the components' names that the script chose."""
    return sorted(set(names) - set(RESERVED_NAMES))


def _open(paths: MemoryPaths, owner: int, iteration: int) -> tuple[Slot, int]:
    for info in scan_slots(paths):
        header = info.header
        if header and info.usable and (header.owner, header.iteration) == (owner, iteration):
            return Slot(info.path, writable=True), int(info.path.suffix[1:])
    raise ReplicaCorrupt(f"rank {owner}'s slot of iteration {iteration} is not in {paths.slots}")
