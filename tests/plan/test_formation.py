from __future__ import annotations

import pytest

from gemini_run.plan.formation import Before, Forming, may_begin


def forming(joined: str, coming: str = "", least: int = 2, most: int = 4) -> Forming:
    return Forming(frozenset(joined), frozenset(coming), least, most)


@pytest.mark.parametrize(
    ("joined", "coming", "name", "place"),
    [
        ("", "", "x", True),
        ("abc", "", "x", True),
        ("abcd", "", "x", False),
        ("ab", "cd", "x", False),  # those who are on their way come first
        ("ab", "cx", "x", True),  # and it does not count against itself
        ("abc", "dx", "x", False),
    ],
)
def test_who_has_a_place(joined: str, coming: str, name: str, place: bool) -> None:
    assert forming(joined, coming).place_for(name) is place


@pytest.mark.parametrize(
    ("joined", "coming", "living", "waited", "begins"),
    [
        ("abcd", "", "", 0, True),  # full: at once
        ("abcd", "e", "", 0, True),
        ("a", "", "", 1e9, False),  # never below the least
        ("abc", "", "bcd", 5, False),  # d lives: it is only slow
        ("abc", "", "bcd", 31, True),  # but not for ever
        ("abc", "d", "bc", 5, False),  # d is on its way
        ("abc", "", "bc", 5, False),  # d is lost: it may be replaced
        ("abc", "", "bc", 10, True),  # it was not
        ("ab", "", "b", 10, True),
        ("abce", "", "bc", 0, True),  # it was, by e
    ],
)
def test_when_a_round_of_four_begins_again(joined: str, coming: str, living: str, waited: float, begins: bool) -> None:
    before = Before(4, frozenset(living))
    assert may_begin(forming(joined, coming), before, waited=waited, shrink_after=10, limit=30) is begins


def test_a_round_that_is_as_large_as_the_one_before_need_not_wait_to_be_full() -> None:
    before = Before(2, frozenset("b"))
    assert may_begin(forming("ab", most=8), before, waited=0, shrink_after=10, limit=30)
    assert not may_begin(forming("ab", "c", most=8), before, waited=0, shrink_after=10, limit=30)
