"""Ranks of a job as forks of one interpreter, so that torch is imported once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def run_ranks(count: int, train: Callable[[int], None]) -> list[int]:
    """Call `train` with each rank, in processes of their own; their exit codes, by rank."""
    children = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train(rank)
                code = 0
            except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
                sys.excepthook(*sys.exc_info())
            os._exit(code)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
