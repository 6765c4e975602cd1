"""The promises of memory/segment.py: identity, adoption, scanning, beacons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gemini_run.memory.beacons import Beacon, BeaconState, read_beacons
from gemini_run.memory.segment import NodeMemory, agent_alive, node_directories, occupied_bytes, scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.testing.slotfiles import write_slot
from gemini_run.wire import MemoryPaths, memory_root, run_memory

CLAIM = """
    import sys
    from pathlib import Path
    from gemini_run.memory.segment import NodeMemory
    memory = NodeMemory.claim(sys.argv[1], Path(sys.argv[2]))
    memory.save_notes({"node_rank": 3})
    print(memory.node_id, flush=True)
    sys.stdin.read()
"""


def claim_elsewhere(run_id: str, base: Path) -> tuple[subprocess.Popen[str], str]:
    """Another process that claims a directory and holds it until it is ended."""
    command = [sys.executable, "-c", textwrap.dedent(CLAIM), run_id, str(base)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_new_directory_is_private_and_says_who_it_is(tmp_path: Path) -> None:
    memory = NodeMemory.claim("a/b run", tmp_path)
    assert not memory.adopted
    assert memory.paths.root == run_memory("a/b run", tmp_path) / memory.node_id
    for directory in (memory_root(tmp_path), memory.paths.root.parent, memory.paths.root, memory.paths.slots):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert json.loads(memory.paths.node_json.read_text())["node_id"] == memory.node_id
    assert [p.root for p in node_directories("a/b run", tmp_path)] == [memory.paths.root]
    assert node_directories("other", tmp_path) == []


def test_two_agents_on_one_host_have_two_directories(tmp_path: Path) -> None:
    process, other = claim_elsewhere("run", tmp_path)
    try:
        memory = NodeMemory.claim("run", tmp_path)
        assert memory.node_id != other and not memory.adopted
        assert len(node_directories("run", tmp_path)) == 2
    finally:
        kill(process)


def test_many_agents_that_start_at_once_never_share(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(CLAIM), "run", str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        ids = [process.stdout.readline().strip() for process in processes if process.stdout]
        assert len(set(ids)) == 4 and all(ids)
    finally:
        for process in processes:
            kill(process)


def test_memory_of_a_killed_agent_is_adopted_whole(tmp_path: Path) -> None:
    process, node_id = claim_elsewhere("run", tmp_path)
    [paths] = node_directories("run", tmp_path)
    write_slot(paths.slot(0, 0), iteration=4, tensors={"a": b"abc"})
    assert agent_alive(paths)
    kill(process)
    assert not agent_alive(paths)
    memory = NodeMemory.claim("run", tmp_path)
    assert memory.adopted and memory.node_id == node_id
    assert memory.notes() == {"node_rank": 3}
    found = memory.find(0, 4)
    assert found is not None and found.path == paths.slot(0, 0)
    assert NodeMemory.claim("other run", tmp_path).node_id != node_id


def test_asking_whether_an_agent_lives_does_not_hold_the_lock(tmp_path: Path) -> None:
    """`status` must not turn an agent that restarts at that moment into a newcomer."""
    memory = NodeMemory.claim("run", tmp_path)
    paths = memory.paths
    assert agent_alive(paths) and agent_alive(paths)
    memory.release(remove=False)
    before = os.stat(paths.lock).st_mtime_ns
    assert not agent_alive(paths)
    assert os.stat(paths.lock).st_mtime_ns == before
    assert not agent_alive(MemoryPaths(tmp_path / "absent"))


@pytest.mark.parametrize(
    "text",
    ['{"version": 2, "node_id": "x", "notes": {}}', "{", "[]", '{"version": 1}', '{"version": 1, "node_id": 3}'],
)
def test_a_directory_it_cannot_read_is_left_alone(tmp_path: Path, text: str) -> None:
    first = NodeMemory.claim("run", tmp_path)
    first.release(remove=False)
    first.paths.node_json.write_text(text)
    second = NodeMemory.claim("run", tmp_path)
    assert second.node_id != first.node_id and not second.adopted
    assert first.paths.node_json.read_text() == text


def test_half_made_directories_are_never_taken(tmp_path: Path) -> None:
    half = run_memory("run", tmp_path) / ".host-abc"
    half.mkdir(parents=True)
    (half / "node.json").write_text('{"version": 1, "node_id": "host-abc", "notes": {}}')
    (half / "lock").touch()
    assert NodeMemory.claim("run", tmp_path).node_id != "host-abc"
    assert len(node_directories("run", tmp_path)) == 1


def test_notes_are_kept(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    assert memory.notes() == {}
    memory.save_notes({"node_rank": 1, "history": [[0, 0], [1, 20]]})
    memory.release(remove=False)
    assert NodeMemory.claim("run", tmp_path).notes() == {"node_rank": 1, "history": [[0, 0], [1, 20]]}


def test_release_removes_only_its_own(tmp_path: Path) -> None:
    one, two = NodeMemory.claim("run", tmp_path), NodeMemory.claim("run", tmp_path)
    one.release(remove=True)
    one.release(remove=True)
    assert not one.paths.root.exists() and two.paths.root.exists()
    two.release(remove=True)
    assert not memory_root(tmp_path).exists()


def test_base_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        NodeMemory.claim("run", tmp_path / "file")


def test_scan_says_what_is_wrong_with_each_slot(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    paths = memory.paths
    for index in range(5):
        write_slot(paths.slot(0, index), iteration=index, tensors={"a": b"x" * 9000})
    Slot(paths.slot(0, 1), writable=True).begin()
    os.truncate(paths.slot(0, 2), 8192)
    with paths.slot(0, 3).open("r+b") as file:
        file.seek(8)
        file.write(b"\x09")
    with paths.slot(0, 4).open("r+b") as file:
        file.seek(40)
        file.write(b"\xff\xff")
    (paths.slots / ".r00000.9.1.new").write_bytes(b"")
    infos = {int(info.path.suffix[1:]): info for info in memory.scan()}
    assert infos[0].usable and infos[0].problem is None
    assert [infos[i].usable for i in range(1, 5)] == [False] * 4
    assert "torn" in str(infos[1].problem)
    assert "truncated: 8192 of" in str(infos[2].problem)
    assert "format version 9" in str(infos[3].problem)
    assert "checksum" in str(infos[4].problem)
    assert memory.find(0, 0) is not None and memory.find(0, 1) is None and memory.find(1, 0) is None
    assert scan_slots(MemoryPaths(tmp_path / "absent")) == []


def test_free_slot_path_spares_what_must_stay(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    paths = memory.paths
    assert memory.free_slot_path(0, 0) == paths.slot(0, 0)
    write_slot(paths.slot(0, 0), iteration=10, tensors={"a": b"x"})
    write_slot(paths.slot(0, 1), iteration=11, tensors={"a": b"x"}, hold=True)
    write_slot(paths.slot(1, 0), iteration=10, tensors={"a": b"x"})
    assert memory.free_slot_path(0, keep=10) == paths.slot(0, 2)
    assert memory.free_slot_path(0, keep=9) == paths.slot(0, 0)
    assert memory.free_slot_path(1, keep=9) == paths.slot(1, 1), "there is room for two"


def test_free_slot_path_takes_a_useless_slot_before_the_last_good_one(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    paths = memory.paths
    write_slot(paths.slot(0, 0), iteration=9, tensors={"a": b"x"})
    write_slot(paths.slot(0, 1), iteration=10, tensors={"a": b"x"})
    assert memory.free_slot_path(0, keep=11) == paths.slot(0, 0), "the older of two"
    refused = Slot(paths.slot(0, 1), writable=True)
    refused.refuse()
    refused.close()
    assert memory.free_slot_path(0, keep=10) == paths.slot(0, 1)
    paths.slot(0, 1).write_bytes(b"no slot")
    assert memory.free_slot_path(0, keep=10) == paths.slot(0, 1)


STATE = BeaconState(
    pid=77, phase="training", iteration=2**40, snapshot=9, committed=8, changed_at=1.5, stall=0.25, state_bytes=2**35,
    first_step_at=3.5,
)  # fmt: skip


def test_beacons_are_read_as_written(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    beacon = Beacon(memory.paths.beacon(2), writable=True)
    assert read_beacons(memory.paths) == {}, "a worker that said nothing yet is missing"
    beacon.write(STATE)
    (memory.paths.beacons / "l003").touch()
    assert read_beacons(memory.paths) == {2: STATE}
    assert read_beacons(MemoryPaths(tmp_path / "absent")) == {}


def test_a_beacon_of_a_phase_unknown_here_is_passed_over(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    Beacon(memory.paths.beacon(0), writable=True).write(STATE)
    with memory.paths.beacon(0).open("r+b") as file:
        file.seek(4)
        file.write(b"\x63")
    assert read_beacons(memory.paths) == {}


def test_a_slot_just_made_holds_nothing_and_is_no_damage(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    Slot.create(memory.paths.slot(0, 0), 8192).close()
    [info] = memory.scan()
    assert info.torn and not info.usable and not info.unknown_version
    assert "nothing was written" in str(info.problem)
    memory.release(remove=True)


def test_occupied_bytes_count_slots_that_are_being_made(tmp_path: Path) -> None:
    memory = NodeMemory.claim("run", tmp_path)
    Slot.create(memory.paths.slot(0, 0), 8192).close()
    (memory.paths.slots / ".new").write_bytes(bytes(100))
    size = memory.paths.slot(0, 0).stat().st_size
    assert occupied_bytes(memory.paths) == size + 100
    (memory.paths.slots / "gone").symlink_to("nowhere")  # as a file that is remade between the listing and the look
    assert occupied_bytes(memory.paths) == size + 100
    memory.release(remove=True)
