"""Boxes in the index space of a tensor: which part of the whole a chunk is, and what two of them share. Pure."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Region:
    """`offsets` of its first element in the whole tensor and `shape`, each with one entry per dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, other: Region) -> tuple[slice, ...]:
        """Indices of this region in a tensor that holds `other`, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, other.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


def overlap(one: Region, two: Region) -> Region | None:
    """What both contain, None if that is nothing. They are of one tensor, so of as many dimensions."""
    offsets = tuple(map(max, one.offsets, two.offsets))
    ends = [min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.shape, two.offsets, two.shape, strict=True)]
    shape = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Region(offsets, shape) if all(size > 0 for size in shape) else None
