"""The ``gemini-run`` command: finds the subcommand, and says errors in one line."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from gemini_run import __version__
from gemini_run.errors import ConfigError, GeminiError
from gemini_run.terminal import say

#: subcommand -> click command. Imported when called for: only `run` may need torch.
SUBCOMMANDS = {
    "run": "gemini_run.cli.run:run",
    "status": "gemini_run.cli.status:status",
    "recover": "gemini_run.cli.recover:recover",
    "plan": "gemini_run.cli.plan:plan",
}
_FAILED = 1


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `argv` (default: this process's). A first word that is no subcommand belongs to ``run``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(f"gemini-run {__version__}")
        sys.exit(0)
    name = words.pop(0) if words and words[0] in SUBCOMMANDS else "run"
    state: dict[str, Any] = {"debug": False, "subcommands": tuple(SUBCOMMANDS)}  # `run` sets debug once it knows
    program = "gemini-run" if name == "run" else f"gemini-run {name}"
    try:
        _load(name).main(words, prog_name=program, standalone_mode=False, obj=state)
    except GeminiError as error:
        _end(str(error), error.exit_code, state["debug"])
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)  # --help
    except click.ClickException as error:
        _end(error.format_message(), ConfigError.exit_code, state["debug"])
    except click.Abort:
        _end("interrupted", _FAILED, state["debug"])
    except Exception as error:  # noqa: BLE001 - process top
        _end_of_job(error, state["debug"])
    sys.exit(0)


def _load(name: str) -> click.Command:
    module, _, attribute = SUBCOMMANDS[name].partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


def _end(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    say(f"error: {message}")
    sys.exit(code)


def _end_of_job(error: Exception, debug: bool) -> NoReturn:
    """The ways a job ends that torch has classes for: said in full, without the launcher's own frames."""
    kind = type(error).__name__
    if kind == "ChildFailedError":
        print(error, file=sys.stderr)
        _end("the workers failed; the table above says which came first", _FAILED, debug)
    if kind == "SignalException":
        _end(f"stopped: {error}", _FAILED, debug)
    traceback.print_exc()
    _end(f"{kind}: {error} (a fault of gemini-run; please report the lines above)", _FAILED, False)
