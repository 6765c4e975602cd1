"""Whole checkpoints: from slots into a tier, read by plain torch, and back into slots to the byte."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slotkit import assign_slots, make_slot, parts_of, persist, random_tensor

from gemini_run.durable import checkpoint, layout
from gemini_run.durable.filesystem import FilesystemTier
from gemini_run.durable.tier import ObjectMissing
from gemini_run.durable.upload import SlotReader, Stored, commit, store_part
from gemini_run.errors import DurableError, FormatVersionError, ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import Slot
from gemini_run.plan.persist import Shard, assign


def state(rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Replicated weights of every awkward layout, and a generator state that differs per rank."""
    return {
        "model.0.weight": random_tensor((300, 200), seed),
        "model.0.transposed": random_tensor((30, 20), seed + 1).t(),
        "model.conv": random_tensor((2, 3, 4, 5), seed + 2).contiguous(memory_format=torch.channels_last),
        "model.half": random_tensor((17,), seed + 3).to(torch.bfloat16),
        "model.empty": torch.empty(0, 3),
        "optimizer.state.0.weight.step": torch.tensor(7.0),
        "model.flags": torch.tensor([True, False, True]),
        "rng.torch": torch.full((64,), rank, dtype=torch.uint8),
    }


@pytest.fixture
def memory(tmp_path):
    memory = NodeMemory.claim("run", tmp_path / "shm")
    yield memory
    memory.release(remove=True)


@pytest.fixture
def slots(memory):
    """Two ranks' slots of iteration 7, and their content from the manifest on."""
    paths = {rank: memory.paths.slot(rank, 0) for rank in range(2)}
    content = {
        rank: make_slot(path, state(rank), owner=rank, world_size=2, objects={"rank": rank})
        for rank, path in paths.items()
    }
    return paths, content


PLAIN_TORCH = """
import sys, torch, torch.distributed.checkpoint as dcp
folder, expected = sys.argv[1:]
expected = torch.load(expected)
target = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in expected.items()}
dcp.load(target, checkpoint_id=folder)
for name, tensor in expected.items():
    assert target[name].dtype == tensor.dtype, name
    assert torch.equal(target[name], tensor), name
nested = {"model": {n[6:]: torch.zeros_like(t) for n, t in expected.items() if n.startswith("model.")}}
dcp.load(nested, checkpoint_id=folder)
assert torch.equal(nested["model"]["0.weight"], expected["model.0.weight"])
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(folder, folder + "/../whole.pt")
whole = torch.load(folder + "/../whole.pt")
assert torch.equal(whole["model"]["conv"], expected["model.conv"])
assert "gemini_run" not in sys.modules
print("LOADED", len(expected))
"""


def load_with_plain_torch(folder: Path, expected: dict[str, torch.Tensor], tmp_path: Path) -> str:
    torch.save(expected, tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_TORCH, str(folder), str(tmp_path / "expected.pt")],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_torch_loads_it(slots, tmp_path):
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, slots[0])
    expected = state(0)
    expected["rng.torch@rank1"] = state(1)["rng.torch"]
    output = load_with_plain_torch(tmp_path / "durable" / "it-0000000007", expected, tmp_path)
    assert f"LOADED {len(expected)}" in output


def test_chunks_of_a_sharded_tensor_become_one(memory, tmp_path):
    whole = random_tensor((10, 4), 5)
    paths = {}
    for rank, rows in enumerate((slice(0, 6), slice(6, 10), slice(10, 10))):
        paths[rank] = memory.paths.slot(rank, 0)
        chunk = {"model.w": ((10, 4), (rows.start, 0))}
        tensors = {"model.w": whole[rows], "model.0.weight": whole, "model.conv": whole}
        make_slot(paths[rank], tensors, owner=rank, world_size=3, chunks=chunk)
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, paths)
    expected = {"model.w": whole, "model.0.weight": whole, "model.conv": whole}
    load_with_plain_torch(tmp_path / "durable" / "it-0000000007", expected, tmp_path)
    again = checkpoint.materialise(tier, 7, 2, 3, memory, round=4)
    slot = Slot(again)
    slot.verify()
    slot.close()


def test_equal_tensors_are_stored_once(slots, tmp_path):
    marker = persist(FilesystemTier(str(tmp_path / "durable")), slots[0])
    one_copy = sum(t.numel() * t.element_size() for t in state(0).values())
    data = sum(f.size for name, f in marker.files.items() if name.endswith(".distcp"))
    assert one_copy < data < 1.2 * one_copy + 20_000


@pytest.mark.parametrize("rank", [0, 1])
def test_materialise_gives_the_captured_bytes(tier, slots, memory, rank):
    paths, content = slots
    persist(tier, paths)
    for path in paths.values():
        path.unlink()
    path = checkpoint.materialise(tier, 7, rank, 2, memory, round=9)
    slot = Slot(path)
    header, _ = slot.verify()
    assert (header.round, header.iteration, header.owner, header.world_size) == (9, 7, rank, 2)
    assert header.sealed
    assert not header.hold
    assert bytes(slot.view[HEADER_BYTES : header.end]) == content[rank]
    assert slot.objects(header) == json.dumps({"objects": {"rank": rank}}).encode()
    assert memory.find(rank, 7) is not None
    slot.close()


def test_materialise_spares_sound_and_held_slots(slots, memory, tmp_path):
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, slots[0])
    make_slot(memory.paths.slot(0, 1), state(0), owner=0, world_size=2, iteration=9, hold=True)
    path = checkpoint.materialise(tier, 7, 0, 2, memory, round=9)
    assert path == memory.paths.slot(0, 2)


def test_corrupt_bytes_are_refused_and_leave_a_torn_slot(slots, memory, tmp_path):
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, slots[0])
    places = layout.read_index(tier.get_bytes(layout.folder(7) + layout.INDEX))
    place = max(places, key=lambda p: p.raw_length)
    with (tmp_path / "durable" / "it-0000000007" / place.file).open("r+b") as file:
        file.seek(place.raw_offset + 5)
        byte = file.read(1)
        file.seek(place.raw_offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    for path in slots[0].values():
        path.unlink()
    with pytest.raises(ReplicaCorrupt, match=r"rank 0: tensor 'model.0.weight' fails its checksum"):
        checkpoint.materialise(tier, 7, 0, 2, memory, round=9)
    assert memory.find(0, 7) is None
    assert checkpoint.newest_committed(tier) == 7, "sizes are right: only reading it tells"
    with pytest.raises(ReplicaCorrupt, match="fails its checksum"):
        checkpoint.verify(tier, 7)


def test_verify_accepts_what_was_written(tier, slots):
    marker = persist(tier, slots[0])
    assert checkpoint.verify(tier, 7) == marker


def test_without_marker_there_is_no_iteration(tier, slots):
    paths, _ = slots
    assignment = assign_slots(paths)
    stored = Stored()
    for rank, part in parts_of(assignment, paths).items():
        stored.add(store_part(tier, 7, rank, {rank: part}))
        assert checkpoint.newest_committed(tier) is None
    with pytest.raises(ObjectMissing):
        checkpoint.read_marker(tier, 7)
    commit(tier, 7, assignment, stored, world_size=2, run_id="r", now=1.0)
    assert checkpoint.committed(tier) == [7]
    assert checkpoint.newest_committed(tier) == 7


def test_the_marker_is_written_last(slots, tmp_path):
    order = []

    class Recording(FilesystemTier):
        def put_file(self, name, source, stop=None):
            order.append(name)
            super().put_file(name, source, stop)

    persist(Recording(str(tmp_path / "durable")), slots[0])
    assert order[-1] == "it-0000000007/gemini.json"
    assert order.count(order[-1]) == 1


def test_killed_at_any_file_of_an_upload(slots, memory, tmp_path):
    """Case A26: whatever a killed upload leaves, the newest checkpoint is the last whole one, and can be read."""
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, slots[0])
    path = memory.paths.slot(0, 3)
    make_slot(path, state(0, seed=9), iteration=9)

    def dying_at(number: int) -> None:
        replace, left = os.replace, [number]

        def counted(*names):  # the file is written and has not its name yet
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            replace(*names)

        os.replace = counted
        persist(tier, {0: path}, 9)

    for survived in itertools.count():
        child = os.fork()
        if not child:
            try:
                dying_at(survived)
            finally:
                os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            break
        assert checkpoint.newest_committed(tier) == 7
        checkpoint.verify(tier, 7)
    assert survived >= 3
    assert checkpoint.newest_committed(tier) == 9
    checkpoint.verify(tier, 9)


def test_commit_refuses_what_is_incomplete(slots, tmp_path):
    tier = FilesystemTier(str(tmp_path / "durable"))
    assignment = assign_slots(slots[0])
    part = parts_of(assignment, slots[0])[0]
    stored = store_part(tier, 7, 0, {0: part})
    with pytest.raises(DurableError, match="was not stored"):
        commit(tier, 7, assignment, stored, world_size=2, run_id="r", now=1.0)
    assert checkpoint.committed(tier) == []


def test_a_missing_or_short_file_sends_us_to_the_one_before(slots, memory, tmp_path, capfd):
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, slots[0])
    path = memory.paths.slot(0, 3)
    make_slot(path, state(0), iteration=9)
    marker = persist(tier, {0: path}, 9)
    name = next(name for name in marker.files if name.endswith(".distcp"))
    os.truncate(tmp_path / "durable" / "it-0000000009" / name, 10)
    assert checkpoint.committed(tier) == [9, 7]
    assert checkpoint.newest_committed(tier) == 7
    assert "iteration 9 refused" in capfd.readouterr().err


def test_unknown_versions_are_an_error_of_their_own(slots, memory, tmp_path):
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, slots[0])
    names = [layout.folder(7) + n for n in (layout.rank_file(0), layout.INDEX, layout.MARKER)]
    for name in names:
        body = json.loads(tier.get_bytes(name))
        body["version"] = 99
        tier.put_bytes(name, json.dumps(body).encode())
    with pytest.raises(FormatVersionError, match="version 99; this release reads version 1"):
        checkpoint.newest_committed(tier)
    with pytest.raises(FormatVersionError):
        checkpoint.read_record(tier, 7, 0)
    with pytest.raises(FormatVersionError):
        layout.read_index(tier.get_bytes(names[1]))


def test_another_world_size_is_refused(slots, memory, tmp_path):
    tier = FilesystemTier(str(tmp_path / "durable"))
    persist(tier, slots[0])
    with pytest.raises(DurableError, match="of 2 ranks, this job has 3"):
        checkpoint.materialise(tier, 7, 0, 3, memory, round=1)


def test_prune_keeps_the_newest_and_drops_markers_first(memory, tmp_path):
    deleted = []

    class Recording(FilesystemTier):
        def delete(self, names):
            names = list(names)
            deleted.extend(names)
            super().delete(names)

    tier = Recording(str(tmp_path / "durable"))
    for iteration in (1, 2, 3):
        path = memory.paths.slot(0, iteration)
        make_slot(path, {"model.w": random_tensor((3,), iteration)}, iteration=iteration)
        persist(tier, {0: path}, iteration)
    assert checkpoint.prune(tier, 2) == [1]
    assert checkpoint.committed(tier) == [3, 2]
    assert deleted[0] == "it-0000000001/gemini.json"
    assert not (tmp_path / "durable" / "it-0000000001").exists()
    with pytest.raises(ValueError, match="never removed"):
        checkpoint.prune(tier, 0)


def test_partial_uploads_are_removed_and_whole_ones_not(tier, slots):
    persist(tier, slots[0])
    tier.put_bytes("it-0000000009/__0_0.distcp", b"half")
    tier.put_bytes("it-notes.txt", b"the user's own")
    assert checkpoint.remove_partial(tier) == [9]
    assert checkpoint.newest_committed(tier) == 7
    assert tier.get_bytes("it-notes.txt")
    assert not [name for name in tier.list("it-0000000009")]


def test_a_slot_that_is_being_written_is_not_read(memory):
    path = memory.paths.slot(0, 0)
    make_slot(path, state(0))
    writer = Slot(path, writable=True)
    with pytest.raises(DurableError, match="does not hold iteration 8"):
        SlotReader(path, 8)
    with SlotReader(path, 7) as reader:
        assert not writer.try_lock(), "a reader keeps writers away"
        writer.begin()
        with pytest.raises(DurableError, match="changed"):
            reader.check_unchanged()
    writer.close()


def test_memory_that_rotted_after_capture_is_not_stored(memory, tmp_path):
    path = memory.paths.slot(0, 0)
    make_slot(path, state(0))
    slot = Slot(path, writable=True)
    header = slot.header()
    slot.view[header.payload_offset] ^= 1
    slot.close()
    with pytest.raises(ReplicaCorrupt, match=r"'model.0.weight' fails its checksum"):
        persist(FilesystemTier(str(tmp_path / "durable")), {0: path})


def test_an_unsealed_slot_is_sealed_first(memory, tmp_path):
    path = memory.paths.slot(0, 0)
    make_slot(path, state(0), seal=False)
    with SlotReader(path, 7) as reader:
        assert reader.header.sealed
        assert assign({0: Shard(reader.shard.manifest, reader.shard.checksums)}).entries
