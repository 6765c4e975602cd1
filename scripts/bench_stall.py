"""Part (a): stall of each checkpoint call and slowdown of training when every iteration is checkpointed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from gemini_run.testing.nodes import LocalCluster, WaitTimeout

WORKER = Path(__file__).with_name("bench_stall_worker.py")
SHARED_MEMORY = Path("/dev/shm")
NUM_WORKERS = 2
NOTHING, FLOOR, OURS = "none", "copy", "gemini-run"
CONTENDERS = (NOTHING, FLOOR, OURS, "torch.save", "dcp.save", "dcp.async_save", "dcp.async_save process")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StallSettings:
    """What part (a) runs."""

    model: str  #: "ddp" or "fsdp2"
    state_mb: float  #: parameters and both moments of AdamW, of each rank
    batch: int
    rounds: int  #: blocks of each contender
    block: int  #: iterations in a block
    seed: int
    contenders: tuple[str, ...]
    timeout_seconds: float
    late_copy: str = "auto"  #: gemini-run's option


def run_stall(settings: StallSettings, nodes: int) -> dict[str, Any]:
    """Run the bench on `nodes` nodes with two workers in all, and return its results, ready for JSON.

    Returns:
        ``{"nodes", "model", "failed"}`` if the run as a whole broke, else also the floor and one entry per contender.
    """
    _check_room(settings, nodes)
    facts = {"nodes": nodes, "model": settings.model, "late_copy": settings.late_copy}
    directory = Path(tempfile.mkdtemp(prefix="gemini-run-bench-", dir=SHARED_MEMORY))
    try:
        with LocalCluster(nodes=nodes, workers_per_node=NUM_WORKERS // nodes, echo=False) as cluster:
            out = cluster.scratch / "stall.json"
            arguments = [
                f"--model={settings.model}", f"--state-mb={settings.state_mb}", f"--batch={settings.batch}",
                f"--rounds={settings.rounds}",
                f"--block={settings.block}", f"--seed={settings.seed}",
                f"--contenders={','.join(settings.contenders)}", f"--directory={directory}", f"--out={out}",
            ]  # fmt: skip
            late = f"--late-copy={settings.late_copy}"
            if nodes == 1:
                node = cluster.nodes[0]
                options = ["--standalone", f"--nproc-per-node={NUM_WORKERS}", f"--rdzv-id={cluster.run_id}"]
                node.start([*options, late, str(WORKER), *arguments])
            else:
                cluster.start(WORKER, *arguments, options=[late])
            try:
                codes = cluster.wait(settings.timeout_seconds)
            except WaitTimeout as error:
                return {**facts, "failed": str(error)}
            if any(codes) or not out.exists():
                return {**facts, "failed": f"exit codes {codes}\n{cluster.tail()}"}
            return {**facts, **summary(json.loads(out.read_text(encoding="utf-8")))}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def summary(raw: dict[str, Any]) -> dict[str, Any]:
    """What the workers measured, in milliseconds and ratios.

    A call's stall and a copy's time are those of the slowest rank, which the others wait for in the next iteration.
    """
    ranks = raw["ranks"]
    floor = [max(at_once) for at_once in zip(*(rank["floor"] for rank in ranks), strict=True)]
    floor_ms = 1e3 * statistics.median(floor)
    lanes = {name: [rank["lanes"][name] for rank in ranks] for name in ranks[0]["lanes"]}
    base = lanes.get(NOTHING, [{"blocks": []}])[0]["blocks"]
    contenders = {name: _contender(lane, base) for name, lane in lanes.items()}
    ours = contenders.get(OURS, {}).get("slowdown_ms")
    for entry in contenders.values():
        if "failed" not in entry:
            entry["ratio_to_gemini_run"] = entry["slowdown_ms"] / ours if ours and ours > 0 else None
            entry["ratio_to_floor"] = entry["slowdown_ms"] / floor_ms
            entry["stall_to_floor"] = entry.get("stall_median_ms", 0.0) / floor_ms
    return {
        "state_bytes": raw["state_bytes"],
        "parameters": raw["parameters"],
        "world_size": raw["world_size"],
        "floor_ms": floor_ms,
        "floor_gb_per_s_of_each_rank": raw["state_bytes"] / 1e6 / floor_ms,
        "contenders": contenders,
    }


def _contender(lane: list[dict[str, Any]], base: list[float]) -> dict[str, Any]:
    error = next((rank["error"] for rank in lane if rank["error"]), None)
    if error is not None:
        return {"failed": error}
    blocks = lane[0]["blocks"]
    stalls = [max(call) for call in zip(*(rank["stalls"] for rank in lane), strict=True)]
    waits = [max(block) for block in zip(*(rank["waits"] for rank in lane), strict=True)]
    # Round by round, so that what slows the machine for a while counts on both sides.
    differences = [block - alone for block, alone in zip(blocks, base, strict=True)]
    return {
        "calls": len(stalls),
        "stall_median_ms": 1e3 * statistics.median(stalls),
        "stall_mean_ms": 1e3 * statistics.mean(stalls),
        "wait_at_end_median_ms": 1e3 * statistics.median(waits),
        "iteration_ms": 1e3 * statistics.mean(blocks),
        "slowdown_ms": 1e3 * statistics.mean(differences),
        "slowdown_median_ms": 1e3 * statistics.median(differences),
        "slowdown_percent": 100 * statistics.mean(differences) / statistics.mean(base),
        "slowdown_by_round_ms": [1e3 * difference for difference in differences],
    }


def _check_room(settings: StallSettings, nodes: int) -> None:
    """Raises: RuntimeError if the files of all contenders together would not fit."""
    # Of each rank: model and gradients, the floor, gemini-run's two slots of every replica; two files of torch.save and
    # two checkpoints of each DCP contender, of one rank with DDP and of each with FSDP2, and what these stage.
    writers = NUM_WORKERS if settings.model == "fsdp2" else 1
    each = {FLOOR: 0, OURS: 2 * nodes * NUM_WORKERS, "torch.save": 2 * writers, "dcp.save": 2 * writers}
    staging = 2 * writers + NUM_WORKERS
    states = sum(each.get(name, staging) for name in settings.contenders if name != NOTHING) + 2.4 * NUM_WORKERS
    needed = settings.state_mb * 1e6 * states
    free = shutil.disk_usage(SHARED_MEMORY).free
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > min(free, available):
        raise RuntimeError(
            f"{SHARED_MEMORY}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free there and "
            f"{available / 1e9:.1f} GB of memory: lower --state-mb"
        )
