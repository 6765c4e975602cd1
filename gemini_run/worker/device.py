"""State in the memory of CUDA devices: copied over a side stream into slots whose pages are pinned.

Nothing here waits for a device on the training thread. What must be copied before training goes on is ordered on the
device: the training stream waits for the side stream. What may come late (`worker.late`) follows; its digests are
taken on the training stream, where they see the state of the boundary, at the device's memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini_run.memory.header import SlotHeader
from gemini_run.memory.slots import Slot
from gemini_run.terminal import say
from gemini_run.worker.late import Landing, LateItem
from gemini_run.worker.layout import Source, address_of, flat_bytes, plain


def on_cuda(source: Source) -> bool:
    return source.tensor.device.type == "cuda"


def word_sum(flat: torch.Tensor, words: bool) -> torch.Tensor:
    """A digest that host and device compute alike: the sum of the bytes of `flat` (uint8, 1-D) modulo 2^64, taken as
    signed 32-bit words (plus the bytes that are left over) or as single bytes. A 0-dim int64 on its device."""
    if not words:
        return flat.sum(dtype=torch.int64)
    whole = flat.numel() // 4 * 4
    total = flat[:whole].view(torch.int32).sum(dtype=torch.int64)
    return total + flat[whole:].sum(dtype=torch.int64)


class DeviceLanding(Landing):
    """Copies on side streams, which `done` marks the ends of."""

    def __init__(
        self, slot: Slot, header: SlotHeader, items: Sequence[LateItem], done: dict[torch.device, torch.cuda.Event],
        digests: dict[torch.device, torch.Tensor], temporaries: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """
        Args:
            items: with their place in the `digests` of their device as digest.
            digests: int64 in pinned memory, valid once the device is done.
            temporaries: what the side streams still read.
        """
        super().__init__(slot, header)
        self._items = items
        self._done = done
        self._digests = digests
        self._temporaries = temporaries

    def guard(self) -> None:
        for device, event in self._done.items():
            if not event.query():  # type: ignore[no-untyped-call]
                torch.cuda.current_stream(device).wait_event(event)

    def arrived(self) -> list[tuple[int, str]]:
        for event in self._done.values():
            event.synchronize()
        self._temporaries.clear()
        changed = []
        for item in self._items:
            source = item.source
            expected = int(self._digests[source.tensor.device][item.digest])
            if int(word_sum(_target(self.slot, self.header, source), _in_words(source))) != expected:
                changed.append((item.index, item.name))
        return changed


class DeviceCopier:
    """Owns the side streams and the pins of one process."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._said_unpinned = False

    def pin(self, slot: Slot) -> None:
        """Let the devices reach the pages of `slot` themselves. Without it copies are slower, and no less right."""
        code = int(torch.cuda.cudart().cudaHostRegister(address_of(slot.view), slot.capacity, 0))  # type: ignore[no-untyped-call]
        if code and not self._said_unpinned:
            self._said_unpinned = True
            say(
                f"warning: host memory cannot be pinned (CUDA error {code}), so snapshots of device memory are slower: "
                "is there a limit on locked memory (ulimit -l)?"
            )

    def unpin(self, slot: Slot) -> None:
        """Before the slot is unmapped."""
        torch.cuda.cudart().cudaHostUnregister(address_of(slot.view))  # type: ignore[no-untyped-call]

    def start(
        self, slot: Slot, header: SlotHeader, prompt: Sequence[Source], late: Sequence[tuple[int, str, Source]]
    ) -> DeviceLanding:
        """Begin to copy all of `prompt`, before anything that the training stream does from here on, and `late`."""
        items: list[LateItem] = []
        done: dict[torch.device, torch.cuda.Event] = {}
        digests: dict[torch.device, torch.Tensor] = {}
        temporaries: list[torch.Tensor] = []
        devices = dict.fromkeys([s.tensor.device for s in prompt] + [s.tensor.device for _, _, s in late])
        for device in devices:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            training = torch.cuda.current_stream(device)
            first = [source for source in prompt if source.tensor.device == device]
            later = [entry for entry in late if entry[2].tensor.device == device]
            with torch.no_grad(), torch.cuda.device(device):
                sums = None
                if later:
                    sums = torch.stack([word_sum(flat_bytes(s.tensor), _in_words(s)) for _, _, s in later])
                stream.wait_stream(training)
                with torch.cuda.stream(stream):
                    for source in first:
                        temporaries += _copy(slot, header, source)
                if first:
                    training.wait_stream(stream)
                with torch.cuda.stream(stream):
                    for _, _, source in later:
                        temporaries += _copy(slot, header, source)
                    if sums is not None:
                        host = torch.empty(len(later), dtype=torch.int64, pin_memory=True)
                        digests[device] = host.copy_(sums, non_blocking=True)
                        temporaries.append(sums)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(stream)
                done[device] = event
            items += [LateItem(index, name, s, place) for place, (index, name, s) in enumerate(later)]
        return DeviceLanding(slot, header, items, done, digests, temporaries)


def _in_words(source: Source) -> bool:
    return source.pointer % 4 == 0


def _target(slot: Slot, header: SlotHeader, source: Source) -> torch.Tensor:
    return torch.frombuffer(
        slot.view, dtype=torch.uint8, count=source.length, offset=header.payload_offset + source.offset
    )


def _copy(slot: Slot, header: SlotHeader, source: Source) -> list[torch.Tensor]:
    """Enqueue the copy on the current stream; returns what must live until it is done."""
    if not source.length:
        return []
    target = _target(slot, header, source)
    tensor = source.tensor if source.dense else plain(source.tensor)
    target.copy_(flat_bytes(tensor), non_blocking=True)
    return [target, tensor]
