"""Splits a command line at the script: gemini-run's options, torchrun's, the script, the script's own words.

torch's parser classifies every word, also those after the script, and so swallows script options that abbreviate
its own (``--log=x``). Here nothing after the script is looked at, and the script is found by asking the installed
torch's parser which of its options take a value.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """One command line, taken apart. Joined again in this order it means the same.

    Attributes:
        gemini: words of gemini-run's own options.
        torchrun: words of torchrun's options; abbreviations are written out where only one option fits.
        script: script, module or program; None where the command line ends before one.
        script_args: everything after it, verbatim.
    """

    gemini: tuple[str, ...]
    torchrun: tuple[str, ...]
    script: str | None
    script_args: tuple[str, ...]


def split(words: Sequence[str], own: Mapping[str, bool], parser: argparse.ArgumentParser) -> CommandLine:
    """Take `words` apart.

    Args:
        words: the command line without the program's name.
        own: gemini-run's options -> whether they take a value. They are matched exactly, never by abbreviation.
        parser: ``torch.distributed.run.get_args_parser()`` of the installed torch.

    A word that is no known option stays among torchrun's words: its parser says what is wrong with it.
    """
    options = option_strings(parser)
    gemini: list[str] = []
    torchrun: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
            break
        if word == "-" or not word.startswith("-"):
            break
        name, equals, value = word.partition("=")
        if name in own:
            target, takes_value = gemini, own[name] and not equals
        elif word.startswith("--"):
            full = _write_out(name, options)
            target, takes_value = torchrun, _takes_value(full, options) and not equals
            word = f"{full}{equals}{value}"
        else:
            target, takes_value = torchrun, _short_takes_next(word, options)
        taken = 2 if takes_value else 1
        target.extend([word, *words[at + 1 : at + taken]])
        at += taken
    rest = tuple(words[at:])
    return CommandLine(tuple(gemini), tuple(torchrun), rest[0] if rest else None, rest[1:])


def option_strings(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every option string of `parser` (``--log-dir``, ``--log_dir``, ``-r``) -> its action."""
    return {string: action for action in parser._actions for string in action.option_strings}


def _write_out(name: str, options: Mapping[str, argparse.Action]) -> str:
    """The full name of an abbreviated option; `name` itself where none or several options fit."""
    if name in options:
        return name
    fitting = [string for string in options if string.startswith(name)]
    if len({id(options[string]) for string in fitting}) == 1:
        return fitting[0]
    return name


def _takes_value(name: str, options: Mapping[str, argparse.Action]) -> bool:
    action = options.get(name)
    return action is not None and action.nargs != 0


def _short_takes_next(word: str, options: Mapping[str, argparse.Action]) -> bool:
    """Whether ``-r`` or ``-mr`` takes the next word; ``-r3`` and ``-r=3`` carry their value."""
    for position, letter in enumerate(word[1:], start=1):
        if not _takes_value(f"-{letter}", options):
            continue
        return position == len(word) - 1
    return False
