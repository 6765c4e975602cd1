"""The soak, in short: random failures, and the same end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster
SOAK = Path(__file__).parents[2] / "scripts" / "soak.py"


def test_random_failures_end_in_the_same_state(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--episodes=1", "--steps=60", "--seed=4", f"--keep={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every final state is torch.equal to the undisturbed run's" in done.stdout
