"""One pass over the data as a snapshot has it, and the tensors that hold what is frozen of it."""

from __future__ import annotations

import dataclasses

import torch

from gemini_run.worker.sampling import Indices, State, freeze

_ROOM = 8192  #: bytes; frames are multiples of this, so that the capture plan stays valid
_LENGTH = 8  #: bytes of length before what is framed


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass over the data."""

    at_iter: State  #: all draws (`Draws.state`) when it began
    at_first: State | None = None  #: when its first index batch was drawn, where something else drew in between
    skip: int = 0  #: batches that training had taken before the restart
    expected: bytes = b""  #: the digest of their indices
    seeds: bool = True  #: its beginning drew the seed of the worker processes
    taken: int = 0
    finished: bool = False
    indices: Indices | None = None  #: what the DataLoader draws from; None for an IterableDataset
    after_iter: State | None = None
    frozen: bytes | None = None

    def start(self) -> bytes:
        """`at_iter` and `at_first`, frozen."""
        if self.frozen is None:
            self.frozen = freeze([self.at_iter, self.at_first])
        return self.frozen

    def digest(self) -> bytes:
        return self.expected if self.indices is None else self.indices.digest


class Frames:
    """Bytes as uint8 tensors, which go into a slot as they are."""

    def __init__(self) -> None:
        self._made: dict[str, list[torch.Tensor]] = {}

    def frame(self, kind: str, *parts: bytes) -> list[torch.Tensor]:
        """Each of `parts` behind its length, in tensors whose size stays while there is room for the longest."""
        longest = max(map(len, parts), default=0)
        needed = -(-(longest + _LENGTH) // _ROOM) * _ROOM if longest else _LENGTH
        frames = self._made.get(kind, [])
        if len(frames) != len(parts) or any(frame.numel() < needed for frame in frames):
            frames = self._made[kind] = [torch.zeros(needed, dtype=torch.uint8) for _ in parts]
        for frame, data in zip(frames, parts, strict=True):
            said = len(data).to_bytes(_LENGTH, "little") + data
            frame[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        return frames


def unframed(frame: torch.Tensor) -> bytes:
    data = frame.numpy().tobytes()
    return data[_LENGTH : _LENGTH + int.from_bytes(data[:_LENGTH], "little")]
