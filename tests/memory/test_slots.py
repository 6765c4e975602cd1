"""The promises of memory/slots.py: commit order, refusal of damage, room."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gemini_run.errors import FormatVersionError, MemoryFull, ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, SLOT_VERSION, SlotHeader, build_header, layout
from gemini_run.memory.settle import settle_file
from gemini_run.memory.slots import Slot, set_file_hold
from gemini_run.plan.manifest import Manifest
from gemini_run.testing.slotfiles import manifest_of, write_slot

TENSORS = {"model.a": bytes(range(200)), "model.b": b"\x07" * 5000, "model.empty": b""}
OBJECTS = b'{"lr":0.1}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "r00003.0"
    write_slot(file, iteration=7, owner=3, world_size=4, round=2, tensors=TENSORS, objects=OBJECTS)
    return file


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ mask]))


def verify(path: Path) -> SlotHeader:
    slot = Slot(path)
    try:
        return slot.verify()[0]
    finally:
        slot.close()


def test_everything_written_is_read_back(path: Path) -> None:
    slot = Slot(path)
    header, manifest = slot.verify()
    assert (header.owner, header.iteration, header.round, header.world_size) == (3, 7, 2, 4)
    assert header.complete and header.sealed and not header.hold
    assert slot.objects(header) == OBJECTS
    payload = slot.payload(header)
    assert {i.name: bytes(payload[i.offset : i.offset + i.length]) for i in manifest.items} == TENSORS
    assert slot.stored_checksums(header) == slot.item_checksums(manifest, header)


def test_header_survives_pack_and_unpack() -> None:
    header = build_header(
        manifest_text=b"x", num_items=3, payload_length=100, objects=b"yy", round=2**40, iteration=2**50, owner=9,
        world_size=10, hold=True, now=12.5,
    )  # fmt: skip
    header = dataclasses.replace(header, sequence=4, sealed=99)
    assert SlotHeader.unpack(header.pack()) == header
    assert header.hold


def test_sections_do_not_overlap_and_the_payload_is_page_aligned() -> None:
    for manifest_length, items, payload in ((0, 0, 0), (1, 1, 1), (4097, 1000, 12345)):
        m, c, p, o = layout(manifest_length, items, payload)
        assert m == HEADER_BYTES and m + manifest_length <= c and c + 8 * items <= p and p + payload <= o
        assert p % 4096 == 0 and c % 64 == 0 and o % 64 == 0


def test_torn_between_begin_and_commit(path: Path) -> None:
    slot = Slot(path, writable=True)
    before = slot.header()
    slot.begin()
    assert not slot.header().complete
    with pytest.raises(ReplicaCorrupt, match="torn"):
        slot.verify()
    slot.commit(before)
    assert slot.header().sequence == before.sequence + 1, "a reader must see that the slot was written again"
    assert slot.header().sealed == before.sealed


def test_a_killed_writer_leaves_a_torn_slot(path: Path) -> None:
    code = """
        import os, signal, sys
        from pathlib import Path
        from gemini_run.memory.slots import Slot
        slot = Slot(Path(sys.argv[1]), writable=True)
        slot.begin()
        slot.view[8192:9000] = bytes(808)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=False)
    assert done.returncode == -9
    with pytest.raises(ReplicaCorrupt, match="torn"):
        verify(path)


def test_a_commit_outlives_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "r00000.0"
    code = """
        import os, signal, sys
        from pathlib import Path
        from gemini_run.testing.slotfiles import write_slot
        write_slot(Path(sys.argv[1]), iteration=5, tensors={"a": b"abc"}, seal=False)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=False)
    header = settle_file(path)
    assert header.iteration == 5 and header.sealed
    assert verify(path) == header


def test_refused_slot_stays_refused(path: Path) -> None:
    slot = Slot(path, writable=True)
    slot.refuse()
    with pytest.raises(ReplicaCorrupt, match="torn"):
        verify(path)


def test_truncated_file_is_refused(path: Path) -> None:
    size = path.stat().st_size
    header = Slot(path).header()
    os.truncate(path, header.end - 1)
    with pytest.raises(ReplicaCorrupt, match=r"r00003\.0: truncated slot"):
        Slot(path).header()
    os.truncate(path, 100)
    with pytest.raises(ReplicaCorrupt, match="truncated slot"):
        Slot(path)
    assert size > header.end


def test_newer_version_is_named_as_such(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", SLOT_VERSION + 1))
    with pytest.raises(FormatVersionError, match=rf"version {SLOT_VERSION + 1}; this release reads"):
        Slot(path).header()


def test_newer_manifest_version_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r00000.0"
    manifest = manifest_of({"a": b"abc"})

    class Newer(Manifest):
        def to_json(self) -> bytes:
            return super().to_json().replace(b'"version":1', b'"version":2')

    newer = Newer(manifest.owner, manifest.world_size, manifest.local_world_size, manifest.items)
    write_slot(path, iteration=1, tensors={"a": b"abc"}, manifest=newer)
    with pytest.raises(FormatVersionError, match=r"r00000\.0: manifest of format version 2"):
        verify(path)


def test_no_slot_at_all(tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"\0" * 8192)
    with pytest.raises(ReplicaCorrupt, match="not a slot"):
        Slot(tmp_path / "junk").header()
    with pytest.raises(FileNotFoundError):
        Slot(tmp_path / "absent")


def test_any_flipped_bit_that_means_something_is_found(path: Path) -> None:
    """Header, manifest, checksum table, payload and objects: one byte each in turn, and the padding in no case."""
    header = Slot(path).header()
    manifest = Slot(path).manifest(header)
    meaningful = [0, 8, 16, *range(24, 152, 5)]  # magic, version; sequence; fields and their checksum
    meaningful += [header.manifest_offset, header.manifest_offset + header.manifest_length - 1]
    meaningful += [header.checksums_offset, header.checksums_offset + 8 * header.num_items - 1]
    for item in manifest.items:
        if item.length:
            meaningful += [header.payload_offset + item.offset, header.payload_offset + item.offset + item.length - 1]
    meaningful += [header.objects_offset, header.objects_offset + header.objects_length - 1]
    for at in meaningful:
        mask = 0xFF if at == 16 else 0x10
        flip(path, at, mask)
        if at == 16:  # the sequence number is a counter: any value but 0 says complete
            assert verify(path).sequence != header.sequence
        else:
            with pytest.raises(ReplicaCorrupt):
                verify(path)
        flip(path, at, mask)
    assert verify(path) == header


def test_corrupt_tensor_is_named(path: Path) -> None:
    header = Slot(path).header()
    manifest = Slot(path).manifest(header)
    flip(path, header.payload_offset + manifest.items[1].offset + 17)
    with pytest.raises(ReplicaCorrupt, match=r"'model\.b' fails its checksum"):
        verify(path)


def test_unsealed_slot_is_complete_and_can_be_sealed_later(tmp_path: Path) -> None:
    path = tmp_path / "r00000.1"
    header = write_slot(path, iteration=3, tensors=TENSORS, seal=False)
    assert header.complete and not header.sealed
    assert not verify(path).sealed
    sealed = settle_file(path)
    assert sealed.sealed and settle_file(path) == sealed
    flip(path, sealed.payload_offset)
    with pytest.raises(ReplicaCorrupt, match="fails its checksum"):
        verify(path)


def test_seal_refuses_a_torn_slot(path: Path) -> None:
    Slot(path, writable=True).begin()
    with pytest.raises(ReplicaCorrupt, match="torn"):
        settle_file(path)


def test_writing_again_unseals_first(path: Path) -> None:
    write_slot(path, iteration=8, owner=3, world_size=4, tensors=TENSORS, seal=False)
    header = verify(path)
    assert header.iteration == 8 and not header.sealed


def test_hold_flag_without_touching_the_rest(path: Path) -> None:
    before = Slot(path).header()
    slot = Slot(path, writable=True)
    slot.set_hold(True)
    assert Slot(path).header().hold and slot.header_hold()
    assert dataclasses.replace(Slot(path).header(), flags=0) == before
    assert set_file_hold(path, 7, False)
    assert Slot(path).header() == before
    assert not set_file_hold(path, 6, True), "another iteration: not its slot"
    assert not set_file_hold(path.with_name("absent"), 7, True)
    assert Slot(path).header() == before


def test_two_writers_exclude_each_other_and_a_reader_keeps_writers_away(path: Path) -> None:
    one, two, reader = Slot(path, writable=True), Slot(path, writable=True), Slot(path)
    assert one.try_lock() and not two.try_lock() and not reader.try_lock(shared=True)
    one.unlock()
    assert reader.try_lock(shared=True) and two.try_lock(shared=True) and not one.try_lock()
    reader.unlock()
    two.unlock()
    assert two.try_lock()


def test_read_only_mapping_cannot_write(path: Path) -> None:
    with pytest.raises(TypeError):
        Slot(path).begin()


def test_create_replaces_the_file_and_leaves_old_mappings_alone(path: Path) -> None:
    old = Slot(path)
    header = old.header()
    new = Slot.create(path, 3 * 4096 + 1)
    assert new.capacity == path.stat().st_size == 4 * 4096
    assert path.stat().st_blocks * 512 >= new.capacity, "allocated, not sparse"
    assert path.stat().st_mode & 0o777 == 0o600
    assert old.verify()[0] == header
    with pytest.raises(ReplicaCorrupt):
        new.header()


def test_create_clears_what_a_killed_creator_left(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    abandoned = tmp_path / f".r00000.0.{gone.pid}.new"
    alive = tmp_path / f".r00000.0.{os.getppid()}.new"
    other = tmp_path / f".r00000.1.{gone.pid}.new"
    for file in (abandoned, alive, other):
        file.write_bytes(b"x")
    Slot.create(tmp_path / "r00000.0", 4096).close()
    assert not abandoned.exists() and alive.exists() and other.exists()


def test_create_in_a_missing_directory_is_no_lack_of_memory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Slot.create(tmp_path / "absent" / "r00000.0", 4096)


FULL_TMPFS = """
    import subprocess, sys
    from pathlib import Path
    from gemini_run.errors import MemoryFull
    from gemini_run.memory.slots import Slot, free_bytes
    base = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(base)], check=True)
    first = Slot.create(base / "r00000.0", 512 << 10)
    first.view[:] = bytes(first.capacity)
    try:
        Slot.create(base / "r00000.1", 600 << 10)
    except MemoryFull as error:
        assert error.needed_bytes == 600 << 10 and error.free_bytes == 512 << 10, error
        assert "0.6 MiB is needed, 0.5 MiB are free" in str(error) and "--memory-dir" in str(error), error
    else:
        raise SystemExit("no MemoryFull")
    assert sorted(p.name for p in base.iterdir()) == ["r00000.0"]
    assert free_bytes(base) == 512 << 10
"""


def test_full_file_system_is_an_error_with_numbers(tmp_path: Path) -> None:
    """Case A29."""
    if os.getuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no private mount namespace here (unshare -m)")
    command = ["unshare", "-m", sys.executable, "-c", textwrap.dedent(FULL_TMPFS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_full_carries_the_numbers() -> None:
    error = MemoryFull("full", needed_bytes=3, free_bytes=2)
    assert (error.needed_bytes, error.free_bytes, error.exit_code) == (3, 2, 1)
