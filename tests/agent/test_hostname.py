"""A host whose own name resolves nowhere: single-node jobs run there all the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from jobs import GEMINI_RUN, PATIENCE, environment

from gemini_run.testing.nodes import free_port, require_root_namespaces

pytestmark = pytest.mark.cluster

NAME = "no-such-host.invalid"
SCRIPT = """
import os, sys
from pathlib import Path
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{socket.gethostname()} {int(value)} {os.environ['MASTER_ADDR']}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["standalone", "c10d"])
def test_the_own_name_cannot_be_resolved(way: str, tmp_path: Path) -> None:
    reason = require_root_namespaces()
    if reason:
        pytest.skip(reason)
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    options = ["--standalone"]
    if way == "c10d":
        options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=r"]
    words = [*GEMINI_RUN, *options, "--nproc-per-node=2", str(path), str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--uts", "--kill-child", "sh", "-c", f'hostname {NAME} && exec "$@"', "sh", *words],
        env=environment(tmp_path / "home"), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in "01":
        host, total, address = (tmp_path / rank).read_text().split()
        assert (host, total) == (NAME, "2") and address != NAME
