"""A file system without one free page: notes and beacons still fit, and what does not is an error, never a SIGBUS."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gemini_run.testing.nodes import require_root_namespaces

SCRIPT = """
    import os, sys
    from pathlib import Path
    from gemini_run.errors import MemoryFull
    from gemini_run.memory.beacons import Beacon, BeaconState, read_beacons
    from gemini_run.memory.reserve import with_reserve
    from gemini_run.memory.segment import NodeMemory, refuse_durable
    from gemini_run.wire import MemoryPaths

    base = Path(sys.argv[1])

    def fill():
        with open(base / "filler", "ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)) == 4096:
                    pass
            except OSError:
                pass
        assert os.statvfs(base).f_bavail == 0

    def beacon(paths, local_rank):
        made = with_reserve(paths, lambda: Beacon(paths.beacon(local_rank), writable=True))
        made.write(BeaconState(1, "training", 5, 5, 5, 1.0, 0.0, 1, 1.0))

    memory = NodeMemory.claim("run", base)
    fill()
    for number in range(20):
        memory.save_notes({"history": [number] * 100})
    assert memory.notes() == {"history": [19] * 100}
    refuse_durable(memory.paths, 7)
    for local_rank in range(8):
        beacon(memory.paths, local_rank)
    assert len(read_beacons(memory.paths)) == 8

    # More than there is room for.
    try:
        memory.save_notes({"much": "x" * 2**20})
    except MemoryFull as error:
        assert "host memory full" in str(error) and "--memory-dir" in str(error), error
    else:
        raise SystemExit("no MemoryFull")
    assert memory.notes() == {"history": [19] * 100}
    assert not list(memory.paths.root.glob(".node.json*"))
    fill()
    os.unlink(memory.paths.reserve)
    fill()
    try:
        Beacon(memory.paths.beacon(9), writable=True)
    except OSError as error:
        assert error.errno == 28, error
    else:
        raise SystemExit("a beacon without a page")
    try:
        NodeMemory.claim("another", base)
    except MemoryFull as error:
        assert "0 KiB are free" in str(error), error
    else:
        raise SystemExit("claimed nothing")
    assert not (memory.paths.root.parent.parent / "another").exists()
"""


def test_small_files_fit_where_nothing_else_does(tmp_path: Path) -> None:
    """Case A29."""
    if reason := require_root_namespaces():
        pytest.skip(reason)
    script = 'mount -t tmpfs -o size=2m,huge=never tmpfs $1 && exec $0 -c "$2" $1'
    command = ["unshare", "-m", "sh", "-c", script, sys.executable, str(tmp_path), textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
