"""Part (c): how fast a worker's state comes back from its node's memory, against copying the same bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

from gemini_run.testing.nodes import LocalCluster, WaitTimeout

WORKER = Path(__file__).with_name("bench_restore_worker.py")
STARTING_SECONDS = 180.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreSettings:
    """What part (c) runs."""

    state_mb: float  #: parameters and both moments of AdamW, of each rank
    kills: int
    workers: int  #: ranks of the one node; with more than one each has copied a part of the snapshot only


def run_restore(settings: RestoreSettings) -> dict[str, Any]:
    """Kill worker 0 again and again; returns medians over the restores of all ranks, ready for JSON.

    Returns:
        ``restore_ms`` of the restoring itself (the event's), ``call_ms`` of the whole `Checkpointer.restore()`,
        ``copy_ms`` of the same bytes into used memory and ``new_copy_ms`` into new memory, both by one thread, and
        ``share``, ``new_share``: restoring's speed as a share of these.
    """
    facts = {"workers": settings.workers, "state_mb": settings.state_mb}
    with LocalCluster(nodes=1, workers_per_node=settings.workers, echo=False) as cluster:
        out = cluster.scratch / "restore"
        out.mkdir()
        cluster.start(WORKER, f"--state-mb={settings.state_mb}", f"--out={out}")
        try:
            for _ in range(settings.kills):
                _wait_ready(cluster, out, settings.workers)
                os.kill(int(cluster.nodes[0].worker_pid(0) or 0), signal.SIGKILL)
            _wait_ready(cluster, out, settings.workers)
        except WaitTimeout as error:
            return {**facts, "failed": f"{error}\n{cluster.tail()}"}
        events = [event for event in cluster.events("restored") if event["source"] == "local"]
        found = [json.loads(path.read_text()) for path in out.glob("restored*.json")]
    if len(events) != settings.kills * settings.workers:
        return {**facts, "failed": f"{len(events)} restores from local memory"}
    restore = statistics.median(event["ms"] for event in events)
    copy, new = (1e3 * statistics.median(e[name] for e in found) for name in ("copy_seconds", "new_copy_seconds"))
    return {
        **facts,
        "bytes": found[0]["bytes"],
        "restore_ms": restore,
        "call_ms": 1e3 * statistics.median(entry["seconds"] for entry in found),
        "copy_ms": copy,
        "new_copy_ms": new,
        "share": copy / restore,
        "new_share": new / restore,
    }


def _wait_ready(cluster: LocalCluster, out: Path, workers: int) -> None:
    files = [out / f"ready{rank}" for rank in range(workers)]
    cluster.wait_for(lambda: all(file.exists() for file in files), STARTING_SECONDS, "all ranks to wait")
    for file in files:
        file.unlink()
