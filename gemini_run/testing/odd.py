"""A module with buffers of every dtype and memory layout that a checkpoint must carry."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Odd(nn.Module):
    """Buffers of every kind; persistent and not; each changes at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        for name in ("bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64", "int64"):
            self.register_buffer(f"of_{name}", torch.ones(5, dtype=getattr(torch, name)), persistent=name != "int8")
        for name in ("float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"):
            self.register_buffer(f"of_{name}", torch.randn(5).to(getattr(torch, name)))
        for name in ("complex32", "complex64", "complex128"):
            self.register_buffer(f"of_{name}", torch.randn(5, dtype=torch.complex64).to(getattr(torch, name)))
        self.register_buffer("scalar", torch.tensor(7.0))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("view", torch.randn(3, 8)[:, ::2])
        self.register_buffer("expanded", torch.randn(3, 1).expand(3, 4))
        self.register_buffer("conjugated", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("nan", torch.tensor([float("nan"), -0.0, float("inf")]))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for name, buffer in self.named_buffers():
            raw = torch.randint(256, (buffer.numel() * buffer.element_size(),), dtype=torch.uint8)
            if name == "expanded":
                buffer[:, :1] = torch.randn(3, 1)
            elif name in ("view", "last", "scalar", "conjugated"):
                buffer.copy_(torch.randn(buffer.shape, dtype=buffer.dtype))
            elif name == "of_bool":
                buffer.logical_not_()
            elif buffer.numel():
                buffer.view(torch.uint8).copy_(raw)  # any bits, NaNs with a payload too
        return x @ self.weight

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "pair": (1, float("inf"))}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def raw(tensor: torch.Tensor) -> dict[str, Any]:
    """Its bytes, dtype, shape and strides: `torch.equal` does not know every dtype, and a NaN differs from itself."""
    plain = tensor.detach().resolve_conj().contiguous()
    body = plain.view(-1).view(torch.uint8).clone() if plain.numel() else torch.empty(0, dtype=torch.uint8)
    return {"bytes": body, "dtype": str(tensor.dtype), "shape": list(tensor.shape), "stride": list(tensor.stride())}
