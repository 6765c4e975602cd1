"""Who copies what several ranks hold alike."""

from __future__ import annotations

import random

import pytest

from gemini_run.plan.share import lenders


def copied(lengths: list[int], result: list[list[int]]) -> list[int]:
    """Bytes that each rank copies."""
    ranks = range(len(result[0]))
    return [sum(length for length, row in zip(lengths, result, strict=True) if row[r] == r) for r in ranks]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_all_hold_alike_is_shared_out_evenly(ranks: int) -> None:
    lengths = [1000 + 7 * i for i in range(100)]
    result = lenders(lengths, [[0] * ranks for _ in lengths])
    assert all(len(set(row)) == 1 for row in result), "one copies, all others borrow from it"
    loads = copied(lengths, result)
    assert sum(loads) == sum(lengths) and max(loads) - min(loads) <= max(lengths)


def test_what_differs_is_copied_by_each() -> None:
    assert lenders([10, 10], [[0, 1], [0, 1]]) == [[0, 1], [0, 1]]


def test_two_pairs_and_one_that_has_none() -> None:
    [row] = lenders([10], [[0, 1, 0, 1, -1]])
    assert row == [0, 1, 0, 1, -1]


def test_nobody_borrows_from_one_who_borrows_or_holds_another() -> None:
    rng = random.Random(3)
    for _ in range(50):
        ranks = rng.randrange(1, 6)
        classes = [[rng.randrange(-1, ranks) for _ in range(ranks)] for _ in range(20)]
        lengths = [rng.randrange(5000) for _ in classes]
        result = lenders(lengths, classes)
        assert result == lenders(lengths, classes)
        for row, names in zip(result, classes, strict=True):
            for rank, chosen in enumerate(row):
                assert (chosen == -1) == (names[rank] == -1)
                if chosen >= 0:
                    assert names[chosen] == names[rank] and row[chosen] == chosen


def test_nothing() -> None:
    assert lenders([], []) == []
