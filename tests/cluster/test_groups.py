"""The script's own process groups beside those of the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import PATIENCE, Run, torchrun

pytestmark = pytest.mark.cluster
SCRIPT = Path(__file__).with_name("groups.py")
STEPS = 300


def test_the_scripts_groups_are_what_they_are_without_us(run: Callable[..., Run], tmp_path: Path) -> None:
    """Case A27: no hang, the same names, numbers and results; every iteration is committed."""
    torchrun("--nproc-per-node=2", SCRIPT, STEPS, tmp_path / "plain", tmp_path / "second")
    job = run(2, 1)
    job.cluster.start(SCRIPT, str(STEPS), str(tmp_path / "ours"), str(tmp_path / "another"))
    assert job.cluster.wait(PATIENCE) == [0, 0], job.cluster.tail()
    for rank in range(2):
        plain, ours = (json.loads((tmp_path / who / f"{rank}.json").read_text()) for who in ("plain", "ours"))
        assert len(plain[0]) >= STEPS // 20 and ours == plain
    assert job.cluster.events("snapshots_stopped") == [] and "warning" not in job.said()
