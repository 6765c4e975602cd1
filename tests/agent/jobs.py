"""Small real jobs for the launcher's tests: start one, read what it said and left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gemini_run.agent.guard import members
from gemini_run.journal import read_events

GEMINI_RUN = [sys.executable, "-c", "from gemini_run.cli.main import main; main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PATIENCE = 120.0  #: seconds until a job that hangs fails its test


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment without what launchers read, with a run home of the test's own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "GEMINI_", "TORCHELASTIC_"))}
    memory = home.with_name(f"{home.name}-memory")  # what failed jobs leave goes with the test's directory
    memory.mkdir(exist_ok=True)
    ours = {"GEMINI_RUN_HOME": str(home), "GEMINI_MEMORY_DIR": str(memory), "OMP_NUM_THREADS": "1"}
    return {**clean, **ours, **more}


def script(folder: Path, text: str) -> Path:
    """`text` as a script in `folder`."""
    path = folder / "script.py"
    path.write_text(text)
    return path


def run_job(home: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """`gemini-run *words` to its end."""
    return subprocess.run(
        [*GEMINI_RUN, *map(str, words)],
        env=environment(home, **env),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@contextlib.contextmanager
def started_job(home: Path, *words: object, **env: str) -> Iterator[subprocess.Popen[str]]:
    """`gemini-run *words`, running; killed at the end if it still does."""
    job = subprocess.Popen(
        [*GEMINI_RUN, *map(str, words)],
        env=environment(home, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGKILL)
        job.communicate()


def events(home: Path, name: str | None = None) -> list[dict[str, object]]:
    """The events of the only run in `home`."""
    logs = list((home / "runs").glob("*/events.jsonl"))
    found = [event for log in logs for event in read_events(log)]
    return [event for event in found if name is None or event["event"] == name]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition` holds; fails the test, naming `what`, after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.02)


def living(sessions: set[int]) -> list[int]:
    """Processes of these sessions."""
    return members(sessions)
