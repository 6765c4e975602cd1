from __future__ import annotations

import itertools

import pytest

from gemini_run.plan.region import Region, overlap


@pytest.mark.parametrize(
    ("one", "two", "common"),
    [
        (Region((0,), (4,)), Region((2,), (4,)), Region((2,), (2,))),
        (Region((0,), (2,)), Region((2,), (2,)), None),
        (Region((0,), (0,)), Region((0,), (2,)), None),
        (Region((0, 1), (4, 2)), Region((1, 0), (1, 9)), Region((1, 1), (1, 2))),
        (Region((), ()), Region((), ()), Region((), ())),  # a tensor without dimensions is one element
    ],
)
def test_overlap(one: Region, two: Region, common: Region | None) -> None:
    assert overlap(one, two) == overlap(two, one) == common


def test_any_cut_of_a_tensor_is_made_up_by_any_other() -> None:
    cells = set(itertools.product(range(7), range(3)))
    for old, new in itertools.product(range(1, 9), repeat=2):
        for region in chunks(7, 3, new):
            found = []
            for chunk in chunks(7, 3, old):
                common = overlap(chunk, region)
                if common is not None:
                    assert all(
                        s.start >= 0 and s.stop <= n for s, n in zip(common.within(chunk), chunk.shape, strict=True)
                    )
                    found += list(elements(common))
            assert len(found) == len(set(found)) == region.numel and set(found) == set(elements(region)) & cells


def chunks(rows: int, columns: int, parts: int) -> list[Region]:
    """Rows cut as torch.chunk does; the last ones may be empty."""
    size = -(-rows // parts)
    starts = [min(part * size, rows) for part in range(parts)]
    return [Region((start, 0), (min(size, rows - start), columns)) for start in starts]


def elements(region: Region) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True)))
