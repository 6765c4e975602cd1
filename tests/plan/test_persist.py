from __future__ import annotations

from gemini_run.plan.manifest import Item, Manifest
from gemini_run.plan.persist import Shard, assign


def shard(rank, *rows):
    """rows: (name, length, checksum) or (name, length, checksum, global_shape, offsets)."""
    items = []
    for name, length, _, *chunk in rows:
        shape, offsets = chunk if chunk else (None, None)
        items.append(Item(name, "uint8", (length,), (1,), 0, length, shape, offsets))
    return Shard(Manifest(rank, 2, 1, tuple(items)), tuple(row[2] for row in rows))


def names(assignment):
    return [entry.name for entry in assignment.entries]


def test_equal_bytes_are_stored_once_and_spread():
    rows = [("w", 100, 1), ("x", 60, 2), ("y", 50, 3)]
    result = assign({0: shard(0, *rows), 1: shard(1, *rows)})
    assert names(result) == ["w", "x", "y"]
    assert [entry.writer for entry in result.entries] == [0, 1, 1]
    assert result.uses == {0: (0, 1, 2), 1: (0, 1, 2)}
    assert result.written_by(1) == [1, 2]


def test_what_only_one_rank_has_counts_in_the_balance():
    result = assign({0: shard(0, ("own", 100, 9), ("w", 50, 1)), 1: shard(1, ("w", 50, 1))})
    assert {entry.name: entry.writer for entry in result.entries} == {"own": 0, "w": 1}


def test_where_ranks_differ_nothing_is_lost():
    shards = {r: shard(r, ("w", 8, 1), ("rng", 8, 10 + r // 2)) for r in range(4)}
    result = assign(shards)
    assert names(result) == ["w", "rng", "rng@rank2"]
    assert result.uses == {0: (0, 1), 1: (0, 1), 2: (0, 2), 3: (0, 2)}


def test_other_strides_are_other_tensors():
    a = Item("w", "uint8", (2, 3), (3, 1), 0, 6)
    b = Item("w", "uint8", (2, 3), (1, 2), 0, 6)
    result = assign({r: Shard(Manifest(r, 2, 1, (item,)), (5,)) for r, item in enumerate((a, b))})
    assert names(result) == ["w", "w@rank1"]


def test_chunks_are_parts_of_one_tensor():
    result = assign(
        {
            0: shard(0, ("w", 6, 1, (10,), (0,))),
            1: shard(1, ("w", 4, 2, (10,), (6,))),
            2: shard(2, ("w", 0, 3, (10,), (10,))),
        }
    )
    assert [(e.name, e.shape, e.offsets, e.sizes) for e in result.entries] == [
        ("w", (10,), (0,), (6,)),
        ("w", (10,), (6,), (4,)),
    ]
    assert result.uses[2] == (None,)


def test_a_replica_of_a_chunk_that_differs_is_kept_as_a_tensor_of_its_own():
    result = assign(
        {0: shard(0, ("w", 6, 1, (10,), (0,))), 1: shard(1, ("w", 6, 2, (10,), (0,)))},
    )
    assert [(e.name, e.shape, e.offsets) for e in result.entries] == [
        ("w", (10,), (0,)),
        ("w@rank1", (6,), (0,)),
    ]


def test_ranks_that_disagree_on_the_shape_do_not_share_a_name():
    result = assign({0: shard(0, ("w", 6, 1)), 1: shard(1, ("w", 5, 2)), 2: shard(2, ("w", 6, 1, (9,), (0,)))})
    assert names(result) == ["w", "w@rank1", "w@rank2"]


def test_a_users_own_name_is_not_taken():
    result = assign({0: shard(0, ("w", 6, 1), ("w@rank1", 6, 7)), 1: shard(1, ("w", 6, 2), ("w@rank1", 6, 7))})
    assert names(result) == ["w", "w@rank1", "w@rank1@"]


def test_empty_tensors_stay():
    result = assign({0: shard(0, ("w", 0, 1))})
    assert names(result) == ["w"]
    assert result.uses == {0: (0,)}
