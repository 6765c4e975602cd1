"""What every test sees: no run home, no settings and no launcher variables from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gemini_run.wire import ENV_RUN_HOME


@pytest.fixture(autouse=True)
def _own_run_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run home of the test's own: none ever reads or writes the user's."""
    for name in list(os.environ):
        if name.startswith(("GEMINI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("run-home")
    monkeypatch.setenv(ENV_RUN_HOME, str(home))
    return home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that run whole jobs first: workers of pytest-xdist take files in this order, and the longest must not be
    left for the end."""
    items.sort(key=lambda item: "cluster" not in item.path.parts)
