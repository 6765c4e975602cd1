"""Snapshots: the state at an iteration boundary, copied into a slot on the training thread.

On CPUs the copy is synchronous, unless asked for otherwise: beside a busy core a later copy gains nothing, and nothing
can change the state meanwhile. Checksums are taken on the way, chunk by chunk while it is in the cache; of what another
rank of the node copies (`worker.neighbours`) or is copied later (`worker.late`) only the checksum is taken. State on
CUDA devices is copied over a side stream (`worker.device`), and its checksums come afterwards, on the commit thread,
from bytes that no longer change.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence

import torch
import xxhash

from gemini_run.errors import MemoryFull
from gemini_run.memory.header import SlotHeader, build_header, layout
from gemini_run.memory.segment import occupied_bytes, scan_slots
from gemini_run.memory.slots import Slot, free_bytes
from gemini_run.plan.manifest import Manifest, aligned
from gemini_run.wire import MemoryPaths
from gemini_run.worker import codec
from gemini_run.worker.codec import Json
from gemini_run.worker.components import Component
from gemini_run.worker.device import DeviceCopier, on_cuda
from gemini_run.worker.frozen import Contents
from gemini_run.worker.late import HostLanding, Landing, Late, LateItem
from gemini_run.worker.layout import (
    PlanBuilder,
    Source,
    StructureChanged,
    address_of,
    bytes_at,
    copy_and_digest,
    flat_bytes,
    local_of,
    plain,
)
from gemini_run.worker.neighbours import Borrowing
from gemini_run.worker.ownslots import OBJECTS_RESERVE, OwnSlots

_LOOK_AGAIN_SECONDS = 0.05
STRUCTURE_RESERVE = 256  #: bytes of manifest for a tensor that the first step will make


class Plan:
    """What to copy where; built once, valid while the structure of the state is.

    Attributes:
        manifest: of this shard; `manifest_text` its JSON.
        on_cpu: all of its tensors are in host memory.
        static: JSON of the components' static parts.
    """

    def __init__(self, components: Sequence[Component], owner: int, world_size: int, local_world: int) -> None:
        builder = PlanBuilder()
        static = {component.name: component.build(builder) for component in components}
        self.fixed = len(builder.items)  #: items from here on are found anew, by name, at each snapshot
        for component in components:
            component.dynamic(lambda tensor, path: builder.add(path, tensor, share=False))
        self._by_name = builder.by_name
        self._items = builder.items
        self.sources: list[Source] = builder.sources
        self.manifest = Manifest(owner, world_size, local_world, tuple(builder.items))
        self.manifest_text = self.manifest.to_json()
        self.static = json.dumps(static, separators=(",", ":")).encode()
        self.eligible: tuple[int, ...] = ()  # for late copies
        self.on_cpu = all(source.tensor.device.type == "cpu" for source in self.sources)

    def refresh(self, components: Sequence[Component]) -> dict[str, Json]:
        """Check that the plan still fits and return the dynamic parts as they are now.

        Raises:
            StructureChanged: build a new plan.
        """
        for component in components:
            component.check()
        pending = set(range(self.fixed, len(self._items)))

        def sink(tensor: torch.Tensor, path: str) -> Json:
            index = self._by_name.get(path, -1)
            local = local_of(tensor)
            # A second tensor under one path (a name like "x#") cannot be told apart: rebuild, it is rare.
            if index not in pending or not self._same_layout(index, local):
                raise StructureChanged(path)
            pending.discard(index)
            source = self.sources[index]
            source.tensor, source.pointer = local, local.data_ptr()
            leaf: Json = {"$tensor": index}
            if local.device.type != "cpu":
                leaf["device"] = local.device.type
            return leaf

        dynamic = {component.name: component.dynamic(sink) for component in components}
        if pending:
            raise StructureChanged("a tensor is gone")
        return dynamic

    def _same_layout(self, index: int, local: torch.Tensor) -> bool:
        item, before = self._items[index], self.sources[index].tensor
        return (
            before.device == local.device
            and before.dtype == local.dtype
            and item.shape == tuple(local.shape)
            and before.stride() == local.stride()
        )


class Snapshotter:
    """Writes snapshots into this rank's own slots.

    Not thread-safe; `snapshot` runs on the training thread. The commit thread only reads the slot it was
    handed, until it has said that the iteration is committed.

    Attributes:
        slots: this rank's own.
        landing: of the newest snapshot, where part of it is still on its way: its slot is complete once that is
            finished. None: it is complete.
        late: which tensors are copied late.
    """

    def __init__(
        self, components: Sequence[Component], paths: MemoryPaths, *, owner: int, world_size: int,
        local_world_size: int, round: int, replicas: int, durable: bool, late_copy: str = "auto",
    ) -> None:  # fmt: skip
        """
        Args:
            local_world_size: ranks of this node.
            replicas: copies of each shard, the own one included.
            durable: there is a durable tier, which holds one more slot while it reads it.
            late_copy: see `worker.late.Late`.
        """
        self.landing: Landing | None = None
        self.late = Late(late_copy)
        self._late_copy = late_copy
        self._devices: DeviceCopier | None = None
        self._components = components
        self._paths = paths
        self._owner = owner
        self._world_size = world_size
        self._local_world = local_world_size
        self._round = round
        self._node_slots = (2 * replicas + durable) * local_world_size  # this node's share, at its fullest
        self._plan: Plan | None = None
        self._contents = Contents()
        self.slots = OwnSlots(paths, owner, self._contents)
        self.state_bytes = 0

    def spare(self, iteration: int) -> None:
        """This rank restored from slots of `iteration` of another world. Those that lie under this rank's own names,
        and those of the iteration before, are kept until a newer one is committed."""
        for info in scan_slots(self._paths):
            header = info.header
            if header and info.usable and header.owner == self._owner and header.world_size != self._world_size:
                self.slots.spare(int(info.path.suffix[1:]), iteration)

    def preflight(self, *, strict: bool = True) -> None:
        """Make room for two slots now, before the first step, with what the optimizers will add.

        Args:
            strict: False for a job that goes on: it can do so without new checkpoints, and `snapshot` says if it must.

        Raises:
            MemoryFull: the node's memory cannot hold the slots of its ranks and of the peers' replicas.
            UnsupportedState: something in the state cannot be captured bit for bit.
        """
        plan = self._current_plan()[0]
        expected = sum(component.expected_bytes() for component in self._components)
        expected = max(plan.manifest.payload_length, expected + aligned(len(plan.manifest.items) * 64))
        manifest_length = 2 * len(plan.manifest_text) + STRUCTURE_RESERVE * len(plan.manifest.items)
        capacity = self._capacity(manifest_length, 4 * len(plan.manifest.items), expected)
        try:
            if strict:
                self._check_room(capacity)
            self.slots.make(capacity)
        except MemoryFull:
            if strict:
                raise

    def snapshot(self, iteration: int, *, keep: int, hold: bool, borrowing: Borrowing | None = None) -> Slot:
        """Copy the state, commit the slot (but see `landing`) and return it, locked against other writers.

        Args:
            iteration: number of finished iterations.
            keep: the newest committed iteration; its slot is not touched.
            hold: mark the slot as wanted by the durable tier; it then borrows nothing.
            borrowing: what other ranks of the node copy.

        Raises:
            MemoryFull: the state grew, or a third slot is needed, and there is no room; the kept slot is intact.
            UnsupportedState: the state changed into something that cannot be captured.
        """
        plan, dynamic = self._current_plan()
        objects = codec.pack_objects(iteration, plan.static, dynamic)
        manifest = plan.manifest
        header = build_header(
            manifest_text=plan.manifest_text, num_items=len(manifest.items),
            payload_length=manifest.payload_length, objects=objects, round=self._round,
            iteration=iteration, owner=self._owner, world_size=self._world_size, hold=hold,
        )  # fmt: skip
        index, slot = self.slots.writable(keep, header.end)
        there = self._contents.take(index, manifest)
        slot.begin()
        base = self.slots.address(index) + header.payload_offset
        # What the durable tier waits for is never dropped.
        late = [] if hold else self.late.chosen(plan.eligible, manifest.items)
        landing: Landing | None = None
        if plan.on_cpu:
            fits = borrowing is not None and borrowing.manifest is manifest and not hold
            lenders = list(borrowing.lenders) if fits and borrowing is not None else [-1] * len(manifest.items)
            late = [at for at in late if lenders[at] < 0]
            elsewhere = _instead(lenders, late)
            # What is held for the durable tier is copied anew: bytes that rotted in memory do not stay for good.
            frozen = {} if hold else {at: there[at] for at in there if elsewhere[at] < 0}
            checksums = _copy_and_check(plan.sources, base, _instead(elsewhere, list(frozen)))
            for at in (at for at, before in frozen.items() if checksums[at] != before):
                checksums[at : at + 1] = _copy_and_check([plan.sources[at]], base, [-1])
            self._contents.wrote(index, manifest, checksums, elsewhere)
            header = slot.write_tables(header, checksums, lenders)
            if late:
                items = [LateItem(at, manifest.items[at].name, plan.sources[at], checksums[at]) for at in late]
                landing = HostLanding(slot, header, items)
                self.late.copier.start(landing)
        else:
            landing = self._copy_from_devices(plan, slot, header, late)
        view = slot.view
        view[header.objects_offset : header.objects_offset + len(objects)] = objects
        view[header.manifest_offset : header.manifest_offset + header.manifest_length] = plan.manifest_text
        self.landing = landing
        if landing is None:
            slot.commit(header)
        else:
            self.late.began(landing)
        self.slots.wrote(index, iteration, hold=hold)
        self.state_bytes = manifest.payload_length
        return slot

    def _copy_from_devices(self, plan: Plan, slot: Slot, header: SlotHeader, late: Sequence[int]) -> Landing | None:
        """Begin to copy what is on CUDA devices, and copy the rest."""
        devices = self._devices
        if devices is None:
            _copy(plan.sources, slot, header.payload_offset)
            return None
        later = set(late)
        prompt = [s for at, s in enumerate(plan.sources) if on_cuda(s) and at not in later]
        landing = devices.start(
            slot, header, prompt, [(at, plan.manifest.items[at].name, plan.sources[at]) for at in late]
        )
        _copy([s for s in plan.sources if not on_cuda(s)], slot, header.payload_offset)
        if self._late_copy == "never":
            landing.arrived()
            return None
        return landing

    @property
    def manifest(self) -> Manifest:
        if self._plan is None:
            raise RuntimeError("no snapshot was taken yet")
        return self._plan.manifest

    def _current_plan(self) -> tuple[Plan, dict[str, Json]]:
        if self._plan is not None:
            try:
                return self._plan, self._plan.refresh(self._components)
            except StructureChanged:
                pass  # e.g. the first step made the optimizer's state
        plan = self._plan = Plan(self._components, self._owner, self._world_size, self._local_world)
        plan.eligible = self.late.eligible(
            plan.sources[: plan.fixed], (t for c in self._components for t in c.steady())
        )
        if self._devices is None and any(map(on_cuda, plan.sources)):
            self._devices = DeviceCopier()
            self.slots.pin(self._devices)
        try:
            return plan, plan.refresh(self._components)
        except StructureChanged as error:
            raise RuntimeError(f"the state changes while it is looked at: {error}") from error

    def _check_room(self, capacity: int) -> None:
        """Raises: MemoryFull if this node cannot hold all of its slots at their fullest, of so many bytes each."""
        needed = self._node_slots * capacity
        for last in (False, False, True):
            # Other ranks make their slots at this moment: a file may be missed between two looks.
            there = free_bytes(self._paths.slots) + occupied_bytes(self._paths) - self._bytes_of_other_worlds()
            if needed <= there:
                return
            if not last:
                time.sleep(_LOOK_AGAIN_SECONDS)
        raise MemoryFull(
            f"host memory is too small for the checkpoints of this node: {needed / 2**20:.1f} MiB needed "
            f"({self._node_slots} slots of {capacity / 2**20:.1f} MiB), {there / 2**20:.1f} MiB free in "
            f"{self._paths.slots}: enlarge /dev/shm (mount -o remount,size=...; docker --shm-size; a Kubernetes "
            "emptyDir with medium: Memory), name another tmpfs with --memory-dir, or lower --replicas",
            needed_bytes=needed,
            free_bytes=there,
        )

    def _bytes_of_other_worlds(self) -> int:
        """Of slots that are kept until this world has committed an iteration."""
        headers = [info.header for info in scan_slots(self._paths) if info.usable]
        return sum(header.end for header in headers if header and header.world_size != self._world_size)

    def _capacity(self, manifest_length: int, num_items: int, payload_length: int) -> int:
        return layout(manifest_length, num_items, payload_length)[3] + OBJECTS_RESERVE


def _instead(lenders: list[int], late: Sequence[int]) -> list[int]:
    """`lenders`, and somebody for each of these tensors as well."""
    instead = list(lenders)
    for index in late:
        instead[index] = 0
    return instead


def _copy(sources: Sequence[Source], slot: Slot, payload_offset: int) -> None:
    """Copy every tensor, from whatever device."""
    memmove = ctypes.memmove
    base = address_of(slot.view) + payload_offset
    for source in sources:
        if not source.length:
            continue
        tensor = source.tensor
        if tensor.device.type != "cpu":
            target = torch.frombuffer(
                slot.view, dtype=torch.uint8, count=source.length, offset=payload_offset + source.offset
            )
            target.copy_(flat_bytes(tensor if source.dense else plain(tensor)))
        elif source.dense:
            memmove(base + source.offset, source.pointer, source.length)
        else:
            copied = plain(tensor)
            memmove(base + source.offset, copied.data_ptr(), source.length)


def _copy_and_check(sources: Sequence[Source], base: int, lenders: Sequence[int]) -> list[int]:
    """Copy every tensor that nobody else copies (-1); returns the checksums of all (xxh3_64 of their bytes)."""
    digest = xxhash.xxh3_64_intdigest
    checksums = []
    for source, lender in zip(sources, lenders, strict=True):
        length, target = source.length, base + source.offset
        if not length:
            checksums.append(_NOTHING)
            continue
        if source.dense:
            pointer, data = source.pointer, source.bytes()
        else:
            copied = plain(source.tensor)  # stays alive to the end of this turn
            pointer, data = copied.data_ptr(), bytes_at(copied.data_ptr(), length)
        if lender >= 0:
            checksums.append(digest(data))
        else:
            checksums.append(copy_and_digest(target, pointer, data))
    return checksums


_NOTHING = xxhash.xxh3_64_intdigest(b"")
