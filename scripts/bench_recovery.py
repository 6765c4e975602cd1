"""Part (b): from SIGKILL of a worker to training again, and what was lost."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemini_run.testing.nodes import LocalCluster, WaitTimeout

WORKER = Path(__file__).with_name("bench_recovery_worker.py")
SHARED_MEMORY = Path("/dev/shm")
NUM_WORKERS = 2
OURS, TWO, COLD, TORCHRUN = "gemini-run", "gemini-run two agents", "gemini-run --no-zygote", "torchrun + torch.save"
CONTENDERS = (OURS, TWO, COLD, TORCHRUN)
PART_EVENTS = ("worker_failed", "plan_made", "round_started", "zygote_forked", "restored")
STARTING_SECONDS = 120.0
RECOVERY_SECONDS = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoverySettings:
    """What part (b) runs."""

    kills: int
    save_every: int  #: iterations between the torch.saves
    batch: int
    seed: int
    contenders: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """A line of a worker: it finished the optimizer step of `iteration`."""

    rank: int
    iteration: int
    time: float
    pid: int


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill to come: of `rank`, so much of an iteration after both ranks have finished `iteration`."""

    rank: int
    iteration: int
    part_of_iteration: float


def kills_of(settings: RecoverySettings) -> list[Kill]:
    """The kills of one job, the same for every contender.

    They lie at evenly spread distances from the last torch.save, so that the mean loss is the one of a kill at a
    random moment, however few they are; ranks take turns.
    """
    rng = random.Random(settings.seed)
    every = settings.save_every
    phases = [int((index + 0.5) * every / settings.kills) for index in range(settings.kills)]
    rng.shuffle(phases)
    # One period in between: also the one that lost most passes a save before the next kill.
    return [
        Kill((index + 1) % NUM_WORKERS, (2 * index + 1) * every + phase, rng.random())
        for index, phase in enumerate(phases)
    ]


def run_recovery(settings: RecoverySettings) -> dict[str, Any]:
    """Run every contender's job in turn, and return the results, ready for JSON."""
    contenders = {}
    for name in settings.contenders:
        try:
            contenders[name] = _summary(_run(name, settings))
        except (WaitTimeout, RuntimeError, OSError) as error:
            contenders[name] = {"failed": str(error)}
    ours = contenders.get(OURS, {}).get("first_new_step_median_s")
    for entry in contenders.values():
        if "failed" not in entry:
            entry["ratio_to_gemini_run"] = entry["first_new_step_median_s"] / ours if ours else None
    return {"save_every": settings.save_every, "world_size": NUM_WORKERS, "contenders": contenders}


def _run(name: str, settings: RecoverySettings) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="gemini-run-bench-", dir=SHARED_MEMORY))
    try:
        nodes = 2 if name == TWO else 1
        with LocalCluster(nodes=nodes, workers_per_node=NUM_WORKERS // nodes, echo=False) as cluster:
            job = _Job(cluster)
            job.start(name, settings, directory)
            kills, again = [], []
            for kill in kills_of(settings):
                kills.append(job.recover(kill))
                if name != TORCHRUN:  # whose distance from its last save that would change
                    again.append(job.recover(Kill(1 - kill.rank, 0, 0.0)))
            return {
                "iteration_s": job.iteration_seconds(),
                "kills": kills,
                "again": again,
                "zygote_bytes": max((event["bytes"] for event in cluster.events("zygote_ready")), default=None),
            }
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Job:
    """One running job, seen through its STEP lines."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._node = cluster.nodes[0]
        self._lines = cluster.scratch / "steps"
        self._lines.touch()
        self._read = 0
        self.steps: list[Step] = []
        self._groups: list[Step] = []  #: when a worker had its process group

    def start(self, name: str, settings: RecoverySettings, directory: Path) -> None:
        arguments = [str(WORKER), f"--batch={settings.batch}", f"--lines={self._lines}"]
        if name == TWO:
            self._cluster.start(*arguments)
            return
        options = ["--standalone", f"--nproc-per-node={NUM_WORKERS}"]
        if name == TORCHRUN:
            arguments += [f"--save-every={settings.save_every}", f"--checkpoint={directory / 'checkpoint.pt'}"]
            options.append(f"--max-restarts={max(3, settings.kills)}")
            self._node.start(
                [*options, *arguments],
                program=[str(Path(sys.executable).with_name("torchrun"))],
                # Without it every restart ends in a timeout: the new ranks find the addresses of the dead.
                environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )
            return
        options.append(f"--rdzv-id={self._cluster.run_id}")
        if name == COLD:
            options.append("--no-zygote")
        self._node.start([*options, *arguments])

    def recover(self, kill: Kill) -> dict[str, Any]:
        """Kill once training is there, and wait until it is beyond everything it had finished.

        Raises:
            WaitTimeout, RuntimeError: the job did not come so far; with the end of its output.
        """
        self._until(lambda: self._reached(kill.iteration), STARTING_SECONDS, f"iteration {kill.iteration}")
        time.sleep(kill.part_of_iteration * self.iteration_seconds())
        victim = self._newest(kill.rank).pid
        killed = time.time()
        os.kill(victim, signal.SIGKILL)

        def after(beyond: int) -> list[Step]:
            """The first step above `beyond` of each rank, by a process of the new round."""
            first: dict[int, Step] = {}
            for step in self.steps:
                if step.pid not in old and step.iteration > beyond:
                    first.setdefault(step.rank, step)
            return list(first.values())

        # The ranks that were not killed may still have finished a step before they noticed.
        old = {step.pid for step in self.steps}
        self._until(
            lambda: len(after(0)) == NUM_WORKERS, RECOVERY_SECONDS, f"the round after the kill of rank {kill.rank}"
        )
        last = max(step.iteration for step in self.steps if step.pid in old)
        self._until(lambda: len(after(last)) == NUM_WORKERS, RECOVERY_SECONDS, f"iteration {last + 1} after the kill")
        first, new = after(0), after(last)
        return {
            "rank": kill.rank,
            "killed_at": killed,
            "last_iteration": last,
            "lost_iterations": last - min(step.iteration for step in first) + 1,
            "first_step_s": max(step.time for step in first) - killed,
            "first_new_step_s": max(step.time for step in new) - killed,
            "parts_s": self._parts(killed, max(step.time for step in first), old),
        }

    def iteration_seconds(self) -> float:
        """Median time between two steps of one process."""
        gaps = []
        before: dict[int, Step] = {}
        for step in self.steps:
            if step.pid in before:
                gaps.append(step.time - before[step.pid].time)
            before[step.pid] = step
        return statistics.median(gaps)

    def _parts(self, killed: float, first_step: float, old: set[int]) -> dict[str, float]:
        """Seconds after the kill of what gemini-run says in its event log; empty for others. The last rank counts.

        Args:
            old: pids of the round before.
        """
        events = [event for event in self._cluster.events() if event["t"] >= killed]
        if not events:
            return {}
        parts = {}
        for name in PART_EVENTS:
            times = [event["t"] for event in events if event["event"] == name]
            if name == "restored":
                groups = [group.time for group in self._groups if group.pid not in old]
                parts["process_group"] = max(groups, default=killed) - killed
            if times:
                parts[name] = (min(times) if name == "worker_failed" else max(times)) - killed
        parts["first_step"] = first_step - killed
        return parts

    def _newest(self, rank: int) -> Step:
        return next(step for step in reversed(self.steps) if step.rank == rank)

    def _reached(self, iteration: int) -> bool:
        ranks = {step.rank for step in self.steps}
        return len(ranks) == NUM_WORKERS and all(self._newest(rank).iteration >= iteration for rank in ranks)

    def _until(self, predicate: Any, timeout: float, what: str) -> None:
        def look() -> bool:
            self._pump()
            if predicate():
                return True
            if not all(node.running for node in self._cluster.nodes):
                raise RuntimeError(f"the job ended before {what}\n{self._cluster.tail()}")
            return False

        self._cluster.wait_for(look, timeout, what)

    def _pump(self) -> None:
        with self._lines.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return
        self._read += len(whole) + 1
        for line in whole.decode().splitlines():
            what, rank, iteration, at, pid = line.split()
            (self.steps if what == "STEP" else self._groups).append(
                Step(int(rank), int(iteration), float(at), int(pid))
            )


def _summary(raw: dict[str, Any]) -> dict[str, Any]:
    kills = raw["kills"]
    names = list(dict.fromkeys(name for kill in kills for name in kill["parts_s"]))
    parts = {name: [kill["parts_s"][name] for kill in kills if name in kill["parts_s"]] for name in names}
    return {
        "iteration_ms": 1e3 * raw["iteration_s"],
        "first_step_median_s": statistics.median(kill["first_step_s"] for kill in kills),
        "first_new_step_median_s": statistics.median(kill["first_new_step_s"] for kill in kills),
        "lost_iterations_mean": statistics.mean(kill["lost_iterations"] for kill in kills),
        "parts_median_s": {name: statistics.median(values) for name, values in parts.items()},
        "again_first_step_median_s": _median(kill["first_step_s"] for kill in raw["again"]),
        "zygote_bytes": raw["zygote_bytes"],
        "again": raw["again"],
        "kills": kills,
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
