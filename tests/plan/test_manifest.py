"""The promises of plan/manifest.py."""

from __future__ import annotations

import json

import pytest

from gemini_run.errors import FormatVersionError, ReplicaCorrupt
from gemini_run.plan.manifest import ALIGNMENT, Item, Manifest, aligned

MANIFEST = Manifest(
    owner=1,
    world_size=4,
    local_world_size=2,
    items=(
        Item("model.w", "bfloat16", (3, 5), (5, 1), 0, 30),
        Item("model.t", "float32", (5, 3), (1, 5), 64, 60),
        Item("model.chunk", "float32", (2, 4), (4, 1), 128, 32, (8, 4), (6, 0)),
        Item("model.empty", "float32", (0, 4), (4, 1), 192, 0, (8, 4), (8, 0)),
        Item("model.scalar \u00e9\u2028", "int64", (), (), 192, 8),
    ),
)


def test_json_and_back_is_exact() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert MANIFEST.payload_length == 200


def test_equal_manifests_have_equal_text() -> None:
    assert Manifest.from_json(MANIFEST.to_json()).to_json() == MANIFEST.to_json()


def test_a_shard_without_tensors() -> None:
    empty = Manifest(0, 1, 1, ())
    assert empty.payload_length == 0
    assert Manifest.from_json(empty.to_json()) == empty


def test_unknown_version() -> None:
    body = json.loads(MANIFEST.to_json())
    body["version"] = 2
    with pytest.raises(FormatVersionError, match="version 2; this release reads version 1"):
        Manifest.from_json(json.dumps(body).encode())


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b"7", b"\xff\xfe", b'{"version":1}', b'{"version":1,"owner":0,"items":[[1]]}',
     b'{"version":1,"owner":0,"world_size":1,"local_world_size":1,"items":[["a","b",3,[],0,0,null,null]]}'],
)  # fmt: skip
def test_anything_else_is_corrupt(text: bytes) -> None:
    with pytest.raises(ReplicaCorrupt, match="unreadable manifest") as caught:
        Manifest.from_json(text)
    assert not isinstance(caught.value, FormatVersionError)


def test_alignment() -> None:
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert ALIGNMENT == 64
