"""Hosts whose own name resolves nowhere: jobs run there all the same, replicas included."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from jobs import GEMINI_RUN, PATIENCE, environment, events

from gemini_run.testing.nodes import free_port, require_root_namespaces

pytestmark = pytest.mark.cluster

NAME = "no-such-host.invalid"
SCRIPT = """
import os, sys
from pathlib import Path
import socket, torch, torch.distributed as dist
import gemini_run
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
for step in gemini_run.Checkpointer(state={"value": value}).steps(3):
    pass
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{socket.gethostname()} {int(value)} {os.environ['MASTER_ADDR']}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["standalone", "c10d", "two nodes"])
def test_the_own_name_cannot_be_resolved(way: str, tmp_path: Path) -> None:
    reason = require_root_namespaces()
    if reason:
        pytest.skip(reason)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    nodes = 2 if way == "two nodes" else 1
    options = ["--standalone"]
    if way != "standalone":
        options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=r"]
    options += [f"--nnodes={nodes}", f"--nproc-per-node={2 // nodes}"]
    words = [*GEMINI_RUN, *options, str(path), str(tmp_path)]
    start = '"$@"' if nodes == 1 else '"$@" & "$@" && wait $!'
    # With a process namespace of its own, nothing that was started outlives the command.
    unshare = ["unshare", "--uts", "--pid", "--mount-proc", "--kill-child"]
    done = subprocess.run(
        [*unshare, "sh", "-c", f"hostname {NAME} && {start}", "sh", *words],
        env=environment(tmp_path / "home"), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in "01":
        host, total, address = (tmp_path / rank).read_text().split()
        assert (host, total) == (NAME, "2") and address != NAME
    committed = [event["iteration"] for event in events(tmp_path / "home", "snapshot_committed")]
    assert committed, "iterations are complete on every rank"
