"""Launchers that these tests start see the signals as a terminal's programs do."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """A shell's background jobs begin with SIGINT and SIGQUIT ignored, and pass that on."""
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
