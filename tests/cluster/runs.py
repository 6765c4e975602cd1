"""Jobs of two ranks that are killed for real, compared to the bit with one that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini_run.testing.compare import count_tensors, differences
from gemini_run.testing.nodes import LocalCluster, NodeKind, require_root_namespaces

JOB = Path(__file__).with_name("job.py")
STEPS = 60
PAUSE = 0.05  #: seconds of an iteration: failures are to land in the middle of the run
PATIENCE = 90.0
Reference = Callable[..., Path]


def torchrun(*words: object) -> None:
    """The script under plain torchrun: nothing of gemini-run has a part in the reference."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Call it with the job's arguments: the folder of final states of the undisturbed run."""
    done: dict[tuple[object, ...], Path] = {}

    def run(*arguments: object, world: int = 2) -> Path:
        key = (*arguments, world)
        if key not in done:
            out = tmp_path_factory.mktemp("reference") / "out"
            torchrun(f"--nproc-per-node={world}", JOB, f"--steps={STEPS}", f"--out={out}", *arguments)
            done[key] = out
        return done[key]

    return run


class Run:
    """A job on a LocalCluster, and what it left."""

    def __init__(self, cluster: LocalCluster, world: int) -> None:
        self.cluster = cluster
        self.world = world
        self.out = cluster.scratch / "out"
        self.lines = cluster.scratch / "lines"

    def start(self, *arguments: object, options: Sequence[str] = (), only: int | None = None) -> None:
        """On all nodes, or only one of them. May be called again once a node is lost: the same run."""
        command = [f"--steps={STEPS}", f"--pause={PAUSE}", f"--out={self.out}", f"--lines={self.lines}"]
        self.cluster._command = [*options, str(JOB), *command, *map(str, arguments)]
        for index in range(len(self.cluster.nodes)) if only is None else (only,):
            self.cluster.start_node(index)

    def reach(self, iteration: int) -> None:
        """Wait until every rank has finished `iteration`."""
        self.until(lambda: min(self.finished().values(), default=0) >= iteration, f"iteration {iteration}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        self.cluster.wait_for(condition, PATIENCE, what)

    def until_event(self, name: str, count: int) -> list[dict[str, Any]]:
        self.until(lambda: len(self.cluster.events(name)) >= count, f"{count} events {name}")
        return self.cluster.events(name)

    def finished(self) -> dict[int, int]:
        """Rank -> iterations that it has finished, at most; empty until all ranks have said something."""
        newest: dict[int, int] = {}
        for rank, step in self._pairs():
            newest[rank] = max(newest.get(rank, 0), step + 1)
        return newest if len(newest) == self.world else {}

    def repeated(self) -> int:
        """Iterations that any rank did more than once, summed over the failures."""
        pairs = self._pairs()
        return max(sum(1 for r, _ in pairs if r == rank) - STEPS for rank in range(self.world))

    def _pairs(self) -> list[tuple[int, int]]:
        text = self.lines.read_text() if self.lines.exists() else ""
        whole = text.rpartition("\n")[0].splitlines()
        return [(int(rank), int(step)) for rank, step in (line.split() for line in whole)]

    def ends_like(self, reference: Path, *, codes: Sequence[int] | None = None) -> None:
        """Wait for success; every rank's final state equals the reference's, to the bit."""
        assert self.cluster.wait(PATIENCE) == list(codes or [0] * len(self.cluster.nodes)), self.cluster.tail()
        self.equals(reference)

    def equals(self, reference: Path) -> None:
        for rank in range(self.world):
            mine, theirs = (torch.load(folder / f"{rank}.pt", weights_only=True) for folder in (self.out, reference))
            assert count_tensors(mine) > 15
            found = differences(mine, theirs)
            assert not found, f"rank {rank}: {len(found)} differ, such as {found[:6]}\n{self.cluster.tail()}"

    def said(self) -> str:
        """What the newest start of each node printed."""
        return "\n".join(node.output() for node in self.cluster.nodes)


@pytest.fixture
def run() -> Iterator[Callable[..., Run]]:
    """Call it for a Run on a new cluster; all end with the test."""
    clusters: list[LocalCluster] = []

    def make(
        nodes: int = 2, workers: int = 1, kind: NodeKind = "process", world: int | None = None, rate: str | None = None
    ) -> Run:  # fmt: skip
        if kind != "process" and (reason := require_root_namespaces(network=kind == "net")):
            pytest.skip(reason)
        cluster = LocalCluster(nodes=nodes, workers_per_node=workers, kind=kind, rate=rate, echo=False)
        cluster.__enter__()
        clusters.append(cluster)
        return Run(cluster, world or nodes * workers)

    yield make
    for cluster in clusters:
        cluster.__exit__(None, None, None)


class Said:
    """What a command printed."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def ask(cluster: LocalCluster, *words: object) -> Said:
    code = "from gemini_run.cli.main import main; main()"
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = cluster.environment()
    return Said(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE))
