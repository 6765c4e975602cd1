"""The command line is taken apart at the script, and nothing after the script is touched."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from gemini_run.agent.argv import CommandLine, split
from gemini_run.cli.run import run

OWN = run.own_options()


def taken_apart(*words: str) -> CommandLine:
    return split(words, OWN, get_args_parser())


#: script options that abbreviate launcher options, torchrun's and ours (pytorch#120601)
ABBREVIATING = [
    "--r=16",
    "--log=x",
    "--n=3",
    "--logs",
    "d",
    "--g=1",
    "--ckpt=2",
    "--s3=u",
    "--re",
    "--replicas",
    "9",
    "--debug",
    "-m",
    "--",
    "-r",
    "3",
]


@pytest.mark.parametrize("before", [(), ("--standalone",), ("--replicas", "2"), ("--",), ("--no-python",)])
def test_script_arguments_stay_verbatim(before: tuple[str, ...]) -> None:
    command = taken_apart(*before, "train.py", *ABBREVIATING)
    assert command.script == "train.py"
    assert list(command.script_args) == ABBREVIATING


def test_module_with_and_without_separator() -> None:
    for words in (["-m", "pkg.mod", "--logs", "d"], ["-m", "--", "pkg.mod", "--logs", "d"]):
        assert taken_apart(*words) == CommandLine((), ("-m",), "pkg.mod", ("--logs", "d"))


@pytest.mark.parametrize(
    ("words", "torchrun"),
    [
        (["--nproc-per-node", "2"], ("--nproc-per-node", "2")),
        (["--nproc_per_node=2"], ("--nproc_per_node=2",)),
        (["--stand"], ("--standalone",)),
        (["--redir", "3"], ("--redirects", "3")),
        (["--tee=3"], ("--tee=3",)),
        (["--max-r", "4"], ("--max-restarts", "4")),
        (["-r", "3"], ("-r", "3")),
        (["-r3"], ("-r3",)),
        (["-mt", "3"], ("-mt", "3")),
        (["-mt3"], ("-mt3",)),
        (["--log-dir", "--weird"], ("--log-dir", "--weird")),
        (["--no-such-option"], ("--no-such-option",)),
    ],
)
def test_torchrun_options_before_the_script(words: list[str], torchrun: tuple[str, ...]) -> None:
    assert taken_apart(*words, "train.py", "a") == CommandLine((), torchrun, "train.py", ("a",))


def test_own_options_are_sorted_out_wherever_they_stand_before_the_script() -> None:
    command = taken_apart(
        "--replicas=2",
        "--nproc-per-node",
        "2",
        "--durable",
        "s3://b/p",
        "--require-checkpoint",
        "t.py",
        "--durable",
        "x",
    )
    assert command.gemini == ("--replicas=2", "--durable", "s3://b/p", "--require-checkpoint")
    assert command.torchrun == ("--nproc-per-node", "2")
    assert command.script_args == ("--durable", "x")


def test_own_options_are_never_abbreviated() -> None:
    assert taken_apart("--repl", "t.py").gemini == ()


def test_no_script() -> None:
    for words in ([], ["--standalone"], ["--"], ["--log-dir"], ["--replicas"]):
        assert taken_apart(*words).script is None


def test_a_dash_alone_is_a_script() -> None:
    assert taken_apart("-", "x").script == "-"
