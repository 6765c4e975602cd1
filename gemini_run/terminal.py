"""Lines that gemini-run itself says to the user: standard error, one prefix, whole lines."""

from __future__ import annotations

import os
import sys

PREFIX = "gemini-run: "


def say(message: str) -> None:
    """One line to standard error in a single write, so lines of several processes do not mix."""
    text = "".join(f"{PREFIX}{line}\n" for line in message.splitlines() or [""])
    try:
        sys.stderr.flush()
        os.write(2, text.encode(errors="replace"))
    except OSError:
        pass  # standard error is closed: there is nobody to tell
