"""``gemini-run status`` of runs whose reports and memory are real and whose workers' word is written by the test."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemini_run.agent.report import Reporter
from gemini_run.agent.runtime import NodeRuntime, PeerNode, RoundInfo
from gemini_run.agent.state import AgentState
from gemini_run.cli.main import main
from gemini_run.config import Settings
from gemini_run.journal import append_event, write_json_atomic
from gemini_run.memory.beacons import Beacon, BeaconState
from gemini_run.memory.segment import NodeMemory
from gemini_run.plan.recovery import RecoveryPlan
from gemini_run.testing.slotfiles import write_slot
from gemini_run.wire import RunPaths

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["status", *map(str, words)])
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return run


@dataclasses.dataclass
class Rendezvous:
    round: RoundInfo | None


class Job:
    """A run of two nodes with one worker each, at iteration 7."""

    def __init__(self, run_id: str, memory: Path, *, round: int = 0, replicas: int | None = None) -> None:
        self.run_id, self.round = run_id, round
        self.paths = RunPaths.of(run_id)
        self.paths.nodes.mkdir(parents=True)
        settings = {"replicas": replicas, "memory_dir": str(memory), "snapshot_interval": 1}
        facts = {"run_id": run_id, "started_at": time.time() - 60, "script": "/x/train.py", "settings": settings}
        write_json_atomic(self.paths.run_json, {"version": 1, **facts})
        self.memories = [NodeMemory.claim(run_id, memory) for _ in range(2)]
        self.peers = tuple(PeerNode(m.node_id, "host", "127.0.0.1", 1, 1) for m in self.memories)
        plan = RecoveryPlan("memory", 7, (), (), 7, ((0, 0),), "")
        self.reporters: list[Reporter] = []
        for rank, held in enumerate(self.memories):
            beacon = Beacon(held.paths.beacon(0), writable=True)
            beacon.write(BeaconState(100 + rank, "training", 8, 7, 7, time.time(), 0.002, 100, 1.0, int(round == 0)))
            beacon.close()
            self.put(rank, rank)
            runtime = NodeRuntime(Settings(memory_dir=memory, replicas=replicas), run_id, self.paths, held, None)  # type: ignore[arg-type]
            info = RoundInfo(round, rank, 2, self.peers, plan, "127.0.0.1", 1, 0, "local")
            state = AgentState("running", round, {0: (rank, 100 + rank)})
            self.reporters = [
                *getattr(self, "reporters", []),
                Reporter(runtime, type("R", (), {"round": info})(), state),
            ]
        self.report()

    def put(self, node: int, owner: int) -> None:
        path = self.memories[node].paths.slot(owner, 0)
        write_slot(path, iteration=7, owner=owner, world_size=2, tensors={"a": b"x" * 100})

    def replicate(self) -> None:
        self.put(0, 1)
        self.put(1, 0)
        self.report()

    def report(self, phase: str | None = None) -> None:
        for reporter in self.reporters:
            reporter._state.phase = phase or reporter._state.phase
            reporter._write()

    def end(self, *, remove: bool) -> None:
        for memory in self.memories:
            memory.release(remove=remove)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as stack:

        def make(run_id: str, **settings: Any) -> Job:
            made = Job(run_id, tmp_path / "memory", **settings)
            stack.callback(made.end, remove=True)
            return made

        yield make


def test_of_a_healthy_run(job: Callable[..., Job], cli: Cli) -> None:
    made = job("r")
    made.replicate()
    code, out, _ = cli("--json")
    run = json.loads(out)["run"]
    assert code == 0 and (run["state"], run["iteration"], run["lag"], run["round"]) == ("running", 8, 1, 0)
    assert run["tiers"] == {
        "local_memory": {"iteration": 7}, "peer_memory": {"iteration": 7},
        "durable": {"location": None, "iteration": None, "failures": 0},
    }  # fmt: skip
    names = [memory.node_id for memory in made.memories]
    both = [{"rank": rank, "copies": 2, "nodes": names} for rank in (0, 1)]
    assert run["replicas"] == {"asked": 2, "wanted": 2, "degraded": False, "iteration": 7, "ranks": both,
                               "may_lose": names}  # fmt: skip
    assert [(n["state"], n["alive"], n["workers"][0]["committed"]) for n in run["nodes"]] == [("running", True, 7)] * 2
    _, out, _ = cli("r")
    assert out.splitlines()[1].split() == ["state", "running"]
    for said in ("8 finished, 1 of them not yet safe", "2/2", "any one of", "2.0 ms"):
        assert said in out, out
    assert max(map(len, out.splitlines())) <= 80


def test_of_a_degraded_run(job: Callable[..., Job], cli: Cli) -> None:
    """A newcomer in round 1, whose replicas are on their way; then more copies asked for than there are nodes."""
    made = job("r", round=1)
    _, out, _ = cli("r")
    assert "running, degraded: 2 of 2 rank(s) have fewer than 2 copies" in out and "1/2" in out
    made.replicate()
    assert not json.loads(cli("r", "--json")[1])["run"]["replicas"]["degraded"]
    made.memories[1].paths.slot(1, 0).unlink()
    made.memories[1].paths.slot(0, 0).unlink()
    run = json.loads(cli("r", "--json")[1])["run"]
    assert run["replicas"]["degraded"] and [r["copies"] for r in run["replicas"]["ranks"]] == [1, 1]
    # The node is lost: its agent and its memory are gone.
    made.memories[1].release(remove=True)
    file = made.paths.node_json(made.memories[1].node_id)
    write_json_atomic(file, {**json.loads(file.read_text()), "pid": 2**22 + 1})
    run = json.loads(cli("r", "--json")[1])["run"]
    assert (run["state"], run["replicas"]["degraded"], run["nodes"][1]["state"]) == ("recovering", True, "dead")


def test_of_a_run_without_room_for_new_checkpoints(job: Callable[..., Job], cli: Cli) -> None:
    """Case A29."""
    made = job("full", round=2)
    facts = {"needed_bytes": 3 << 20, "free_bytes": 0, "newest": 4}
    append_event(made.paths.events, "memory_full", node="n", rank=0, round=1, iteration=2, **facts)
    assert json.loads(cli("full", "--json")[1])["run"]["no_room"] is None, "of an earlier round"
    append_event(made.paths.events, "memory_full", node="n", rank=1, round=2, iteration=5, **facts)
    no_room = json.loads(cli("full", "--json")[1])["run"]["no_room"]
    assert no_room == {"ranks": [1], "since": 5, "needed_bytes": 3 << 20}
    shown = " ".join(cli("full")[1].split())
    assert "no room for new checkpoints of rank(s) 1 since iteration 5: 3.0 MiB more are needed" in shown
    append_event(made.paths.events, "memory_free", node="n", rank=1, round=2, iteration=9)
    assert json.loads(cli("full", "--json")[1])["run"]["no_room"] is None


def test_of_more_copies_than_nodes(job: Callable[..., Job], cli: Cli) -> None:
    job("r", replicas=3).replicate()
    _, out, _ = cli("r")
    assert "degraded: 3 copies were asked for and there are 2 node(s)" in " ".join(out.split())


def test_of_a_dead_run(job: Callable[..., Job], cli: Cli) -> None:
    """All agents were killed: what they left in memory is still told."""
    made = job("r")
    made.replicate()
    made.end(remove=False)
    append_event(made.paths.events, "node_lost", node="n", cause="silent for 3.0 s")
    code, out, _ = cli("r")
    assert code == 0 and "dead" in out and "silent for 3.0 s" in out and "degraded" not in out
    run = json.loads(cli("r", "--json")[1])["run"]
    assert (run["state"], run["replicas"]["iteration"], run["replicas"]["degraded"]) == ("dead", 7, False)
    assert run["last_failure"]["event"] == "node_lost"


@pytest.mark.parametrize("phase, state", [("succeeded", "finished"), ("failed", "failed"), ("stopped", "stopped")])
def test_of_a_run_that_is_over(phase: str, state: str, job: Callable[..., Job], cli: Cli) -> None:
    made = job("r")
    made.report(phase)
    made.end(remove=True)
    code, out, _ = cli("r", "--watch", "--json")  # ends by itself
    run = json.loads(out)["run"]
    assert code == 0 and (run["state"], run["memory_bytes"]) == (state, 0)
    assert state in cli("r")[1]


def test_of_several_runs(job: Callable[..., Job], cli: Cli) -> None:
    code, out, _ = cli()
    assert code == 0 and "no runs on this machine yet" in out
    assert json.loads(cli("--json")[1]) == {"version": 1, "runs": [], "run": None}
    old, new = job("old"), job("new")
    old.report("succeeded")
    old.end(remove=True)
    document = json.loads(cli("--json")[1])
    assert [(run["run_id"], run["state"]) for run in document["runs"]] == [("new", "running"), ("old", "finished")]
    assert document["run"]["run_id"] == new.run_id
    _, out, _ = cli()
    assert out.index("new") < out.index("old") and "train.py" in out
    code, _, err = cli("nope")
    assert code == 1 and "unknown run 'nope'; known here: new, old" in err


def test_of_agents_whose_memory_cannot_be_seen_from_here(job: Callable[..., Job], cli: Cli) -> None:
    """In another mount namespace, or on another host: their reports count as long as they come, whatever the clocks."""
    made = job("r")
    made.end(remove=True)
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
    files = [made.paths.node_json(memory.node_id) for memory in made.memories]

    def shown(**changes: Any) -> list[bool]:
        for file in files:
            write_json_atomic(file, {**json.loads(file.read_text()), **changes})
        return [node["alive"] for node in json.loads(cli("r", "--json")[1])["run"]["nodes"]]

    try:
        assert shown() == [True, True], "this process is their agent"
        assert shown(pid=zombie.pid) == [False, False]
    finally:
        zombie.wait()
    assert shown(hostname="elsewhere", updated_at=time.time() - 3600) == [True, True], "their clocks are an hour late"
    for file in files:
        os.utime(file, (time.time() - 60, time.time() - 60))
    run = json.loads(cli("r", "--json")[1])["run"]
    assert run["state"] == "dead" and not any(node["alive"] for node in run["nodes"])
