"""The node's status file."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemini_run.agent import report
from gemini_run.agent.report import Reporter
from gemini_run.agent.runtime import NodeRuntime, PeerNode, RoundInfo
from gemini_run.agent.state import AgentState
from gemini_run.config import Settings
from gemini_run.memory.beacons import Beacon, BeaconState
from gemini_run.memory.segment import NodeMemory
from gemini_run.plan.recovery import RecoveryPlan
from gemini_run.testing.slotfiles import write_slot
from gemini_run.wire import RunPaths

PLAN = RecoveryPlan("memory", 7, (), (), 7, ((0, 0),), "")


@dataclasses.dataclass
class FakeRendezvous:
    round: RoundInfo | None = None


@dataclasses.dataclass
class FakePersister:
    durable: int | None = 5
    failures: int = 1


def round_info(number: int, lost: int) -> RoundInfo:
    nodes = (PeerNode("a", "host", "127.0.0.1", 1234, 2), PeerNode("b", "host", "127.0.0.1", 1235, 2))
    return RoundInfo(number, 0, 2, nodes, PLAN, "127.0.0.1", 999, lost, "local")


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[NodeRuntime]:
    memory = NodeMemory.claim("run", tmp_path / "shm")
    paths = RunPaths.of("run", tmp_path / "home")
    paths.nodes.mkdir(parents=True)
    settings = Settings(memory_dir=tmp_path / "shm", durable="/nas/ckpt")
    yield NodeRuntime(settings, "run", paths, memory, None)  # type: ignore[arg-type]
    memory.release(remove=True)


def read(runtime: NodeRuntime) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(runtime.paths.node_json(runtime.memory.node_id).read_text())
    return value


def test_report_before_the_first_round(runtime: NodeRuntime) -> None:
    Reporter(runtime, FakeRendezvous(), AgentState()).stop()
    written = read(runtime)
    assert (written["version"], written["node"], written["pid"]) == (1, runtime.memory.node_id, os.getpid())
    assert (written["state"], written["round"], written["node_rank"]) == ("starting", None, None)
    assert (written["workers"], written["slots"], written["last_failure"]) == ([], [], None)
    assert written["memory_dir"] == str(runtime.memory.paths.root)


def test_report_of_a_running_node(runtime: NodeRuntime) -> None:
    paths = runtime.memory.paths
    write_slot(paths.slot(0, 0), iteration=7, owner=0, world_size=4, round=1, tensors={"a": b"x" * 100}, hold=True)
    write_slot(paths.slot(2, 0), iteration=6, owner=2, world_size=4, round=1, tensors={"a": b"x"}, seal=False)
    (paths.slots / "r00003.0").write_bytes(b"junk")
    Beacon(paths.beacon(0), writable=True).write(BeaconState(10, "training", 8, 7, 6, 1.0, 0.0125, 100, 1.0, 3))
    Beacon(paths.beacon(1), writable=True).write(BeaconState(99, "training", 3, 3, 3, 1.0, 0.0, 100, 1.0))
    state = AgentState("running", 1, {0: (0, 10), 1: (1, 11)}, "worker rank 0 (pid 9) was killed by SIGKILL", 4)
    written = Reporter(runtime, FakeRendezvous(round_info(1, 2)), state, FakePersister()).snapshot()
    assert written == json.loads(json.dumps(written))
    assert (written["state"], written["round"], written["node_rank"], written["num_nodes"]) == ("running", 1, 0, 2)
    assert (written["address"], written["local_world_size"], written["replicas"]) == ("127.0.0.1:1234", 2, 2)
    assert written["workers"] == [
        {"local_rank": 0, "rank": 0, "pid": 10, "phase": "training", "iteration": 8, "snapshot": 7, "committed": 6,
         "stall_ms": 12.5, "state_bytes": 100, "interval": 3},
        {"local_rank": 1, "rank": 1, "pid": 11, "phase": "starting"},  # its beacon is an earlier worker's
    ]  # fmt: skip
    found = [(s["owner"], s["iteration"], s["round"], s["sealed"], s["hold"]) for s in written["slots"]]
    assert found == [(0, 7, 1, True, True), (2, 6, 1, False, False)]
    assert written["memory_bytes"] >= 2 * 4096
    assert written["last_failure"]["cause"] == "worker rank 0 (pid 9) was killed by SIGKILL"
    assert (written["iterations_lost"], written["restarts"], written["restarts_left"]) == (2, 1, 4)
    assert written["durable"] == {"location": "/nas/ckpt", "newest": 5, "failures": 1}


def test_iterations_lost_add_up_over_rounds(runtime: NodeRuntime) -> None:
    rendezvous = FakeRendezvous(round_info(0, 0))
    reporter = Reporter(runtime, rendezvous, AgentState("running"))
    for number, lost in ((0, 0), (1, 1), (1, 1), (2, 3)):
        rendezvous.round = round_info(number, lost)
        written = reporter.snapshot()
    assert (written["iterations_lost"], written["restarts"]) == (4, 2)


def test_forming_again_is_recovering(runtime: NodeRuntime) -> None:
    state = AgentState("rendezvous")
    assert Reporter(runtime, FakeRendezvous(), state).snapshot()["state"] == "rendezvous"
    assert Reporter(runtime, FakeRendezvous(round_info(0, 0)), state).snapshot()["state"] == "recovering"


def test_poke_reports_at_once_and_stop_reports_last(runtime: NodeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "REPORT_SECONDS", 3600.0)
    seen: list[str] = []
    changed = threading.Condition()

    def record(path: Path, value: dict[str, Any]) -> None:
        with changed:
            seen.append(value["state"])
            changed.notify_all()

    monkeypatch.setattr(report, "write_json_atomic", record)
    state = AgentState("running")
    reporter = Reporter(runtime, FakeRendezvous(), state)
    reporter.start()
    with changed:
        assert changed.wait_for(lambda: "running" in seen, 30)
        state.phase = "finished"
        reporter.poke()
        assert changed.wait_for(lambda: "finished" in seen, 30)
    state.phase = "succeeded"
    reporter.stop()
    reporter.stop()
    assert seen[-1] == "succeeded"


def test_a_lost_run_home_is_said_once_and_ends_nothing(runtime: NodeRuntime, capfd: pytest.CaptureFixture[str]) -> None:
    runtime.paths.nodes.rmdir()
    reporter = Reporter(runtime, FakeRendezvous(), AgentState("running"))
    reporter._write()
    reporter._write()
    reporter.stop()
    err = capfd.readouterr().err
    assert err.count("status cannot be written") == 1 and str(runtime.paths.nodes) in err
    runtime.paths.nodes.mkdir()
    reporter._write()
    assert read(runtime)["state"] == "running"
