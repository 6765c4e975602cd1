"""The promises of journal.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from gemini_run.journal import append_event, read_events, write_json_atomic


def test_events_come_back_in_order_with_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "run_started", node="n0", argv=["a\nb", "\u2028"])
    append_event(path, "restored", node="n1", path=tmp_path)
    first, second = read_events(path)
    assert (first["event"], first["node"], first["argv"]) == ("run_started", "n0", ["a\nb", "\u2028"])
    assert second["path"] == str(tmp_path) and second["t"] >= first["t"]


def test_no_log_yet(tmp_path: Path) -> None:
    assert read_events(tmp_path / "absent") == []


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, "a", node="n")
    with path.open("ab") as file:
        file.write(b"[1]\n\xff\xfe\n\n" + b'{"t": 1, "event": "b", "no')
    assert [e["event"] for e in read_events(path)] == ["a"]


def test_an_unwritable_log_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        append_event(tmp_path / "absent" / "events.jsonl", "a", node="n")


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = """
        import sys
        from pathlib import Path
        from gemini_run.journal import append_event
        for i in range(200):
            append_event(Path(sys.argv[1]), "e", node=sys.argv[2], i=i, filler="x" * 3000)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    writers = [subprocess.Popen([*command, str(n)]) for n in range(2)]
    assert [w.wait() for w in writers] == [0, 0]
    assert len(path.read_text().splitlines()) == 400
    events = read_events(path)
    for node in ("0", "1"):
        assert [e["i"] for e in events if e["node"] == node] == list(range(200))


def test_atomic_json_is_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    write_json_atomic(path, {"i": -1})
    done = threading.Event()

    def write() -> None:
        for i in range(300):
            write_json_atomic(path, {"i": i, "filler": "x" * 20000})
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    last = -1
    while not done.is_set():
        now = json.loads(path.read_text())["i"]
        assert now >= last
        last = now
    writer.join()
    assert os.listdir(tmp_path) == ["n.json"]


def test_a_failed_replacement_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    write_json_atomic(path, [1])
    with pytest.raises(TypeError):
        write_json_atomic(path, {(1, 2): 3})
    assert json.loads(path.read_text()) == [1]


def test_only_the_end_of_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for i in range(100):
        append_event(path, "e", node="n", i=i)
    size = path.stat().st_size
    tail = [e["i"] for e in read_events(path, last_bytes=size // 10)]
    assert 5 <= len(tail) <= 10 and tail == list(range(100 - len(tail), 100))
    assert len(read_events(path, last_bytes=10 * size)) == 100
