"""``gemini-run recover`` and ``status`` where there is little to see: no job is started here."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from gemini_run.cli.main import main
from gemini_run.ids import RunId
from gemini_run.memory.header import SLOT_VERSION
from gemini_run.memory.segment import NodeMemory
from gemini_run.testing.slotfiles import write_slot
from gemini_run.wire import RunPaths

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """The memory directory of a dead node with one rank at iterations 6 and 7."""
    node = NodeMemory.claim("r", tmp_path / "memory")
    write_slot(node.paths.slot(0, 0), iteration=6, tensors={"a": b"six" * 100})
    write_slot(node.paths.slot(0, 1), iteration=7, tensors={"a": b"777" * 100})
    node.release(remove=False)
    return node.paths.root


def test_nothing_is_known(cli: Cli) -> None:
    code, _, err = cli("recover")
    assert code == 1 and "no run is known on this machine" in err
    code, _, err = cli("recover", "nope")
    assert code == 1 and "unknown run 'nope'" in err
    code, _, err = cli("status", "nope")
    assert code == 1 and "unknown run 'nope'" in err


def test_a_directory_that_is_something_else(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("recover", tmp_path)
    assert code == 1 and "no memory directory of a run and no durable tier" in err


def test_a_run_that_left_nothing(cli: Cli) -> None:
    paths = RunPaths.of(RunId("gone"))
    paths.root.mkdir(parents=True)
    paths.run_json.write_text(json.dumps({"version": 1, "run_id": "gone", "started_at": 1.0}))
    code, out, err = cli("recover")
    assert code == 1 and err.count("\n") == 1
    assert "run gone: no complete checkpoint found: memory holds no usable slot" in err
    assert out == "", "the reason is said once"
    code, out, _ = cli("status", "--json")
    assert code == 0 and json.loads(out)["run"]["state"] == "dead"


def test_targets_that_cannot_be_written(cli: Cli, memory: Path, tmp_path: Path) -> None:
    for target, problem in ((memory, "it exists, and is not overwritten"), (tmp_path / "a" / "b", "no directory")):
        code, _, err = cli("recover", memory, "--to", target)
        assert code == 2 and problem in err and f"--to {target}" in err


def test_the_newest_is_taken_and_a_damaged_one_left_out(cli: Cli, memory: Path) -> None:
    code, out, _ = cli("recover", memory, "--json")
    assert code == 0 and json.loads(out)["iteration"] == 7
    newest = memory / "slots" / "r00000.1"
    data = bytearray(newest.read_bytes())
    data[data.index(b"777777")] ^= 1
    newest.write_bytes(data)
    code, out, _ = cli("recover", memory, "--json")
    document = json.loads(out)
    assert code == 0 and document["iteration"] == 6
    assert [slot["file"] for slot in document["refused"]] == [str(newest)]
    code, out, _ = cli("recover", memory)
    assert f"refused {newest}: " in out


def test_slots_of_a_newer_release(cli: Cli, memory: Path) -> None:
    for slot in (memory / "slots").iterdir():
        with slot.open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", SLOT_VERSION + 1))
    code, out, err = cli("recover", memory)
    assert code == 1 and "2 slot(s) refused" in err
    assert f"slot of format version {SLOT_VERSION + 1}; this release reads version {SLOT_VERSION}" in out


def test_help_says_what_the_formats_are(cli: Cli) -> None:
    code, out, _ = cli("recover", "--help")
    assert code == 0
    for word in ("torch.load(PATH)", "torch.distributed.checkpoint.load", "--dry-run", "s3://", "exported"):
        assert word in out
