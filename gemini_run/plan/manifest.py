"""What a slot holds, as data: the tensors of one shard by name, layout and place, and the world they are of.

The manifest is JSON and changes only when the *structure* of the state changes; what changes each iteration
(checksums, values that are not tensors) has sections of its own in the slot (see `memory.slots`).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from gemini_run.errors import FormatVersionError, ReplicaCorrupt

MANIFEST_VERSION = 1
ALIGNMENT = 64  #: bytes; every tensor starts on a multiple


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One tensor's bytes in the payload.

    The bytes are those of the tensor's memory in storage order where it is dense in some order of its
    dimensions (`stride` says which), else of its contiguous copy.

    Attributes:
        name: unique within the shard, ``<component>.<path>``, e.g. ``model.0.weight``,
            ``optimizer.state.0.weight.exp_avg``.
        dtype: torch's name without the prefix, e.g. ``bfloat16``.
        shape: local shape.
        stride: elements, as at capture.
        offset: bytes from the start of the payload, a multiple of ALIGNMENT.
        length: bytes.
        global_shape: of the whole tensor where this is a chunk of a DTensor, else None.
        chunk_offsets: where the chunk lies in the whole tensor, else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    length: int
    global_shape: tuple[int, ...] | None = None
    chunk_offsets: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The structure of one rank's shard.

    Attributes:
        owner: global rank whose state this is.
        world_size: ranks in the world it was part of.
        local_world_size: ranks on the owner's node.
        items: in payload order.
    """

    owner: int
    world_size: int
    local_world_size: int
    items: tuple[Item, ...]

    @property
    def payload_length(self) -> int:
        """Bytes from the first tensor's start to the last one's end."""
        return max((item.offset + item.length for item in self.items), default=0)

    def to_json(self) -> bytes:
        body = {
            "version": MANIFEST_VERSION,
            "owner": self.owner,
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "items": [
                [i.name, i.dtype, i.shape, i.stride, i.offset, i.length, i.global_shape, i.chunk_offsets]
                for i in self.items
            ],
        }
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Raises: FormatVersionError for an unknown version, ReplicaCorrupt for anything not a manifest."""
        try:
            body: dict[str, Any] = json.loads(text)
            version = body["version"]
            if version != MANIFEST_VERSION:
                raise FormatVersionError(
                    f"manifest of format version {version}; this release reads version {MANIFEST_VERSION}: "
                    "use the gemini-run that wrote it"
                )
            items = tuple(
                Item(n, d, tuple(s), tuple(st), o, ln, _tuple(g), _tuple(c))
                for n, d, s, st, o, ln, g, c in body["items"]
            )
            return cls(body["owner"], body["world_size"], body["local_world_size"], items)
        except (ValueError, KeyError, TypeError) as error:
            raise ReplicaCorrupt(f"unreadable manifest: {error}") from error


def _tuple(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def aligned(length: int) -> int:
    """`length` rounded up to the next multiple of ALIGNMENT."""
    return -(-length // ALIGNMENT) * ALIGNMENT
