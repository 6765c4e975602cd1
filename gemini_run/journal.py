"""The run's event log: one JSON object a line, appended whole, by agents and workers of every node."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def append_event(path: Path, event: str, /, *, node: str, **fields: Any) -> None:
    """Append one line ``{"t": unix seconds, "event": ..., "node": ..., **fields}`` to `path`.

    A single write() to an O_APPEND descriptor: lines of several processes never mix.

    Raises:
        OSError: the run home is gone or full. Callers on the training path must not let it end training.
    """
    line = json.dumps({"t": round(time.time(), 6), "event": event, "node": node, **fields}, default=str)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


def read_events(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """All whole lines of the log; a torn last line (a writer died) is left out. Missing file: empty.

    Args:
        last_bytes: read only about so much from the end (a long run's log is large); None reads all.
    """
    try:
        with path.open("rb") as file:
            start = 0 if last_bytes is None else max(0, os.fstat(file.fileno()).st_size - last_bytes)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return []
    lines = data.decode("utf-8", errors="replace").split("\n")
    events = []
    for line in lines[1:] if start else lines:  # the first one is cut
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a line cut short by a kill; every other line stands alone
        if isinstance(entry, dict):
            events.append(entry)
    return events


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON; a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
