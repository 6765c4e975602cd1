"""Our options leave torchrun's alone, and the command line's surface does not change unnoticed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from gemini_run.agent.argv import option_strings
from gemini_run.cli.main import main
from gemini_run.cli.run import run
from gemini_run.config import OPTION_NAMES

OURS = {
    "--replicas": True,
    "--snapshot-interval": True,
    "--late-copy": True,
    "--overhead-budget": True,
    "--memory-dir": True,
    "--durable": True,
    "--durable-interval": True,
    "--durable-keep": True,
    "--durable-timeout": True,
    "--require-checkpoint": False,
    "--shrink-after": True,
    "--failure-domain": True,
    "--no-zygote": False,
    "--config": True,
    "--debug": False,
}


def test_the_surface_is_frozen() -> None:
    assert dict(run.own_options()) == OURS


def test_none_of_ours_equals_or_abbreviates_one_of_torchruns() -> None:
    theirs = option_strings(get_args_parser())
    assert len(theirs) > 20, "the installed torch's options were not found"
    clashes = [(mine, other) for mine in OURS for other in theirs if other.startswith(mine)]
    assert clashes == []


def test_every_setting_has_an_option() -> None:
    names = {option.removeprefix("--").replace("-", "_") for option in OURS}
    assert set(OPTION_NAMES) - {"zygote"} <= names


def gemini_run(*words: str) -> subprocess.CompletedProcess[str]:
    code = "from gemini_run.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)


def test_help_shows_ours_and_torchruns() -> None:
    for words in (["--help"], ["run", "--help"]):
        done = gemini_run(*words)
        assert done.returncode == 0
        for option in (*OURS, "--nproc-per-node", "--rdzv-backend", "--log-dir"):
            assert option in done.stdout, option


def test_mistakes_get_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    for words, word in (
        ([], "no script"),
        (["--replicas", "two", "t.py"], "--replicas"),
        (["--no-such-option", "t.py"], "--no-such-option"),
        (["--nnodes", "2", "--replicas", "3", "--rdzv-id", "x", "t.py"], "--replicas 3"),
        (["--nnodes", "many", "t.py"], "--nnodes many"),
        (["--memory-dir", "/no/such/place", "t.py"], "/no/such/place"),
        (["--config", "/no/such/file", "t.py"], "/no/such/file"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        said = capfd.readouterr().err
        assert end.value.code == 2, (words, said)
        lines = [line for line in said.splitlines() if line.strip()]
        assert len(lines) == 1, (words, said)
        assert lines[0].startswith("gemini-run: error: "), lines
        assert word in lines[0], lines


def test_version_and_status_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom gemini_run.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    for words in (["--version"], ["status", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
