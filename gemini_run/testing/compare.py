"""Equality of training state to the bit, and where it ends."""

from __future__ import annotations

from typing import Any


def differences(left: Any, right: Any, at: str = "") -> list[str]:
    """Where two nests of dicts, lists, tensors and plain values differ; empty = bit-identical.

    Tensors are alike if dtype, shape and every element are (``torch.equal``); NaN differs from itself.
    """
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        alike = left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
        return [] if alike else [f"{at}: {_told(left)} is not {_told(right)}"]
    if type(left) is not type(right):
        return [f"{at}: a {type(left).__name__} is not a {type(right).__name__}"]
    if isinstance(left, dict):
        if list(left) != list(right):
            return [f"{at}: keys differ"]
        return [found for key in left for found in differences(left[key], right[key], f"{at}/{key}")]
    if isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return [f"{at}: {len(left)} elements are not {len(right)}"]
        pairs = enumerate(zip(left, right, strict=True))
        return [found for index, (a, b) in pairs for found in differences(a, b, f"{at}/{index}")]
    return [] if left == right else [f"{at}: {left!r} is not {right!r}"]


def count_tensors(state: Any) -> int:
    """Tensors in a nest of dicts and lists: a comparison of none would prove nothing."""
    import torch

    if isinstance(state, torch.Tensor):
        return 1
    if isinstance(state, dict):
        return sum(count_tensors(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(count_tensors(value) for value in state)
    return 0


def _told(tensor: Any) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} with sum {tensor.double().sum().item()!r}"
