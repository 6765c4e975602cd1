"""Functions run in forked processes that end by SIGKILL, under the environment of a gemini-run worker."""

from __future__ import annotations

import functools
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gemini_run.memory.segment import scan_slots
from gemini_run.wire import MemoryPaths


def in_a_fork(body: Callable[[], object], kill_when: Callable[[], bool] | None = None) -> int:
    """Run `body` in a fork of this process; returns the signal that ended it, 0 if it came to its end.

    The fork is killed once `kill_when`, asked again and again, says so.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            torch.set_num_threads(1)  # the parent's pool of threads is not here
            body()
            code = 0
        except BaseException:  # noqa: BLE001 (nothing of pytest may run on in the child)
            traceback.print_exc()
        finally:
            os._exit(code)
    ended, status = 0, 0
    while kill_when is not None and not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and kill_when():
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.001)
    if not ended:
        status = os.waitpid(child, 0)[1]
    try:
        os.killpg(child, signal.SIGKILL)  # what it left behind, as an agent would
    except ProcessLookupError:
        pass  # nothing
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child's traceback is above"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def a_while_after(log: Path, more: int, seconds: float) -> Callable[[], bool]:
    """For `kill_when`: true `seconds` after `more` lines have been added to `log`."""
    before = _lines(log)
    moment: list[float] = []

    def now() -> bool:
        if not moment and _lines(log) >= before + more:
            moment.append(time.monotonic() + seconds)
        return bool(moment) and time.monotonic() > moment[0]

    return now


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def newest_iteration(memory: MemoryPaths) -> int | None:
    """Of the complete slots: what a new round restores."""
    return max((i.header.iteration for i in scan_slots(memory) if i.usable and i.header), default=None)


def until_the_end(as_worker: Any, memory: MemoryPaths, body: Callable[[int], object], kills: int) -> None:
    """Run `body(round)` round after round, as an agent would, until it ends by itself, having died `kills` times."""
    for number in range(kills + 1):
        found = newest_iteration(memory)
        as_worker(round=number, restore_iteration=found, restore_source="none" if found is None else "local")
        ended = in_a_fork(functools.partial(body, number))
        assert ended == (signal.SIGKILL if number < kills else 0), (number, ended)
