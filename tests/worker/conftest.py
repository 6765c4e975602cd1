"""A worker without an agent: the environment an agent would give it, over a scratch memory directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gemini_run.wire import ENV_WORKER, MemoryPaths, WorkerContext


@pytest.fixture
def memory(tmp_path: Path) -> MemoryPaths:
    paths = MemoryPaths(tmp_path / "memory")
    for directory in (paths.slots, paths.beacons):
        directory.mkdir(parents=True)
    return paths


@pytest.fixture
def as_worker(
    memory: MemoryPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., WorkerContext]]:
    """Call it to become rank 0 of 1 in a round; keyword arguments override the context."""
    context = WorkerContext(
        run_id="test", run_dir=str(tmp_path), round=0, node_id="n0", node_rank=0, num_nodes=1,
        memory_dir=str(memory.root), store_host="127.0.0.1", store_port=1, replicas=1, snapshot_interval=1,
        durable_iterations=None, durable_seconds=None, restore_iteration=None, restore_source="none",
    )  # fmt: skip

    def become(**changes: object) -> WorkerContext:
        changed = dataclasses.replace(context, **changes)  # type: ignore[arg-type]
        monkeypatch.setenv(ENV_WORKER, changed.to_json())
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        return changed

    yield become


@pytest.fixture(scope="session", autouse=True)
def _imports_of_the_first_step() -> None:
    """Once here, and not in each forked process."""
    torch.optim.SGD([torch.zeros(1)]).step()
