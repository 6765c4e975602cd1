"""The examples: they learn, they repeat to the bit, and they find their place in the data again."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gemini_run.testing.compare import count_tensors, differences
from gemini_run.testing.nodes import LocalCluster

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
DIGITS_EPOCHS = 20
CHAR_LM = ["--steps=60", "--width=32", "--layers=1", "--context=32", "--lr=1e-2", "--sample=20"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torchrun(script: str, *arguments: str) -> str:
    """Run an example under plain torchrun and return what it printed."""
    with LocalCluster(nodes=1) as cluster:
        cluster.nodes[0].start([*TORCHRUN[1:], str(EXAMPLES / script), *arguments], program=TORCHRUN[:1])
        assert cluster.nodes[0].wait(180) == 0, cluster.tail()
        return cluster.nodes[0].output()


def test_a_char_lm_batch_depends_on_step_and_rank_alone() -> None:
    char_lm = load("char_lm")
    data = torch.arange(1000)
    inputs, targets = char_lm.batch_at(data, 7, 1, 4, 16, seed=5)
    again, _ = char_lm.batch_at(data, 7, 1, 4, 16, seed=5)
    assert torch.equal(inputs, again) and torch.equal(targets, inputs + 1)
    for other in (char_lm.batch_at(data, 8, 1, 4, 16, seed=5), char_lm.batch_at(data, 7, 0, 4, 16, seed=5)):
        assert not torch.equal(inputs, other[0])


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    factor = load("char_lm").warm_up_then_cosine
    rates = [factor(step, warm_up=10, total=100) for step in range(100)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.cluster
def test_char_lm_learns(tmp_path: Path) -> None:
    save, log = tmp_path / "state.pt", tmp_path / "losses"
    output = torchrun("char_lm.py", *CHAR_LM, f"--save={save}", f"--losses={log}")
    losses = [float(line.split()[2]) for line in log.read_text().splitlines()]
    assert len(losses) == 60
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 1.0
    assert "step   20/60" in output and "--- sample" in output
    assert count_tensors(torch.load(save, weights_only=True)) > 20


@pytest.fixture(scope="module")
def digits_reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Output and final state of the digits under plain torchrun."""
    save = tmp_path_factory.mktemp("digits") / "reference.pt"
    return torchrun("digits.py", f"--epochs={DIGITS_EPOCHS}", f"--save={save}"), save


@pytest.mark.cluster
def test_digits_are_recognised(digits_reference: tuple[str, Path]) -> None:
    accuracies = [float(found) for found in re.findall(r"accuracy (\S+)", digits_reference[0])]
    assert len(accuracies) == DIGITS_EPOCHS
    assert accuracies[-1] > 0.94


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [0, 2])
def test_digits_survive_a_worker_in_mid_epoch(workers: int, digits_reference: tuple[str, Path]) -> None:
    """Also with loader workers: their number changes nothing, as no sample is drawn at random."""
    with LocalCluster(nodes=1, workers_per_node=2) as cluster:
        save = cluster.scratch / "state.pt"
        cluster.start(EXAMPLES / "digits.py", f"--epochs={DIGITS_EPOCHS}", f"--save={save}", f"--workers={workers}")
        cluster.wait_for(lambda: cluster.iteration() >= 50, 120, "50 iterations")
        cluster.kill_worker(1)
        assert cluster.wait(120) == [0]
        restored = cluster.events("restored")
        assert {event["rank"] for event in restored} == {0, 1}
        assert cluster.events("replicas_disagree") == []
        assert all(event["source"] == "local" and event["iteration"] >= 49 for event in restored)
        state, reference = (torch.load(path, weights_only=True) for path in (save, digits_reference[1]))
    assert differences(state, reference) == []
