"""The chaos script, in short: random failures, and the same end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
CHAOS = Path(__file__).parents[2] / "scripts" / "chaos.py"


def test_random_failures_end_in_the_same_state(tmp_path: Path) -> None:
    command = [sys.executable, str(CHAOS), "--rounds=8", "--nodes=3", "--steps=120", "--seed=4", f"--keep={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every final state is torch.equal to the undisturbed run's" in done.stdout
