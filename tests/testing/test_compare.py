"""The proof of a recovery rests on this comparison: it must see one bit."""

from __future__ import annotations

import torch

from gemini_run.testing.compare import count_tensors, differences


def state(value: float = 1.0, step: int = 3) -> dict[str, object]:
    return {"model": {"w": torch.tensor([value, 2.0])}, "groups": [{"lr": 0.1, "step": step}]}


def test_equal_states_have_no_differences() -> None:
    assert differences(state(), state()) == []
    assert count_tensors(state()) == 1


def test_one_bit_is_seen_and_located() -> None:
    (found,) = differences(state(), state(value=1.0 + 2**-23))
    assert found.startswith("/model/w:")


def test_values_keys_lengths_types_and_dtypes_are_compared() -> None:
    assert differences(state(), state(step=4)) == ["/groups/0/step: 3 is not 4"]
    assert differences({"a": 1}, {"b": 1}) == [": keys differ"]
    assert differences([1], [1, 2]) == [": 1 elements are not 2"]
    assert differences([1], [1.0]) == ["/0: a int is not a float"]
    assert differences(torch.ones(2), torch.ones(2, dtype=torch.float64)) != []
