"""Frozen tensors are copied once into each slot: where the slot to be overwritten has the bytes, the checksum says so.

No flag and no version counter is believed. A tensor whose checksum was the same in the last two snapshots is only
checksummed at the boundary, and copied after all if that differs from what this process has written there itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini_run.plan.manifest import Manifest


class Contents:
    """What this process has copied into its slots, by slot index. Of what it did not write it knows nothing."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Manifest, list[int | None]]] = {}
        self._newest: tuple[Manifest, Sequence[int]] | None = None

    def take(self, index: int, manifest: Manifest) -> dict[int, int]:
        """Item -> checksum of those that slot `index` holds and that seem frozen. The slot is about to be torn: until
        `wrote` nothing is known of it."""
        entry, newest = self._slots.pop(index, None), self._newest
        if entry is None or newest is None or entry[0] is not manifest or newest[0] is not manifest:
            return {}
        pairs = enumerate(zip(entry[1], newest[1], strict=True))
        return {at: held for at, (held, last) in pairs if held is not None and held == last}

    def wrote(self, index: int, manifest: Manifest, checksums: Sequence[int], elsewhere: Sequence[int]) -> None:
        """A snapshot lies in slot `index` now, but for what is borrowed or still on its way (`elsewhere` >= 0)."""
        held = [c if lender < 0 else None for c, lender in zip(checksums, elsewhere, strict=True)]
        self._slots[index] = (manifest, held)
        self._newest = (manifest, checksums)

    def forget(self, index: int) -> None:
        """Slot `index` is another file."""
        self._slots.pop(index, None)
