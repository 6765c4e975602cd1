"""``gemini-run recover`` and ``status`` on a real job: as it trains, when it is dead, as its copies go one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import torch.distributed.checkpoint as dcp
from runs import PATIENCE, Run
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gemini_run.testing.compare import count_tensors, differences
from gemini_run.testing.nodes import LocalCluster

pytestmark = pytest.mark.cluster


class Said:
    """What a command printed."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def ask(cluster: LocalCluster, *words: object) -> Said:
    code = "from gemini_run.cli.main import main; main()"
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = cluster.environment()
    return Said(subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One job of two nodes, asked at each stage of its decay. Tests look at what was said."""
    exports = tmp_path_factory.mktemp("exports")
    durable = exports / "durable"
    said: dict[str, Any] = {"exports": exports}
    with LocalCluster(nodes=2, echo=False) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "STEPS", 100_000)
        job = Run(cluster, 2)
        own = said["own"] = cluster.scratch / "own"
        job.start(f"--save-each={own}", options=[f"--durable={durable}", "--durable-interval=20it"])
        patch.undo()
        job.until_event("persisted", 1)
        before = min(job.finished().values())
        said["live"] = ask(cluster, "recover", "--json")
        said["live export"] = ask(cluster, "recover", cluster.run_id, "--to", exports / "live.pt")
        said["live status"] = ask(cluster, "status", "--json")
        job.reach(before + 5)
        said["rounds"] = cluster.events("round_started", "worker_failed")

        for node in cluster.nodes:
            node.kill(keep_memory=True)
        said["dead status"] = ask(cluster, "status", "--json")
        said["dead"] = ask(cluster, "recover", "--json")
        said["dead shown"] = ask(cluster, "recover")
        said["dry"] = ask(cluster, "recover", "--dry-run", "--to", exports / "dry")
        said["dead export"] = ask(cluster, "recover", "--to", exports / "dead.pt")
        said["again"] = ask(cluster, "recover", "--to", exports / "dead.pt")
        said["dead dcp"] = ask(cluster, "recover", "--to", exports / "dead.dcp", "--format=dcp")
        memories = [node.memory() for node in cluster.nodes]
        assert memories[0] and memories[1]
        said["directory"] = ask(cluster, "recover", memories[1].root, "--json")

        cluster.nodes[0].kill()
        said["one left"] = ask(cluster, "recover", "--json")
        said["one left export"] = ask(cluster, "recover", "--to", exports / "one.pt")
        for slot in memories[1].slots.iterdir():
            data = bytearray(slot.read_bytes())
            data[len(data) // 2] ^= 1
            slot.write_bytes(data)
        said["damaged"] = ask(cluster, "recover", "--json")
        said["damaged export"] = ask(cluster, "recover", "--to", exports / "damaged.pt")
        cluster.nodes[1].kill()
        said["durable"] = ask(cluster, "recover", durable, "--json")
        said["durable export"] = ask(cluster, "recover", durable, "--to", exports / "durable.pt")
        yield said


def check_export(stages: dict[str, Any], name: str, iteration: int) -> None:
    """The file holds what the script itself had at that iteration, on both ranks."""
    found = torch.load(stages["exports"] / name, weights_only=True)
    assert found["iteration"] == iteration
    for rank in range(2):
        own = torch.load(stages["own"] / f"{iteration}.{rank}", weights_only=True)
        mine = {part: found["ranks"][rank].get(part, found[part]) for part in ("model", "optimizer")}
        assert count_tensors(own) > 15
        assert differences(json_order(mine), json_order(own)) == []
        assert torch.is_tensor(found["ranks"][rank]["rng"]["torch"])


def json_order(state: Any) -> Any:
    """Plain dicts: the container's type and order are not what is compared here."""
    if isinstance(state, dict):
        return {key: json_order(state[key]) for key in sorted(state, key=str)}
    return [json_order(value) for value in state] if isinstance(state, (list, tuple)) else state


def test_beside_a_running_job(stages: dict[str, Any]) -> None:
    plan = stages["live"].json
    assert plan["source"] == "memory" and plan["version"] == 1
    assert {rank["tier"] for rank in plan["ranks"]} == {"local memory"}
    assert [event["event"] for event in stages["rounds"]] == ["round_started"] * 2, "the job was not disturbed"
    assert stages["live export"].code == 0, stages["live export"].err
    iteration = torch.load(stages["exports"] / "live.pt", weights_only=True)["iteration"]
    assert iteration >= plan["iteration"]
    check_export(stages, "live.pt", iteration)
    run = stages["live status"].json["run"]
    assert run["state"] == "running" and len(run["nodes"]) == 2
    assert run["tiers"]["peer_memory"]["iteration"] > 0 and run["tiers"]["durable"]["iteration"] >= 20
    assert len(run["replicas"]["may_lose"]) == 2


def test_of_a_dead_job(stages: dict[str, Any]) -> None:
    assert stages["dead status"].json["run"]["state"] == "dead"
    plan = stages["dead"].json
    assert {rank["tier"] for rank in plan["ranks"]} == {"local memory"}
    assert f"iteration {plan['iteration']} can be recovered" in stages["dead shown"].out
    assert "complete on its own node" in stages["dead shown"].out
    assert not (stages["exports"] / "dry").exists()
    assert "would be exported" in stages["dry"].err
    check_export(stages, "dead.pt", plan["iteration"])
    assert stages["again"].code == 2 and "it exists, and is not overwritten" in stages["again"].err


def test_a_dcp_export_is_read_by_torch_alone(stages: dict[str, Any]) -> None:
    assert stages["dead dcp"].code == 0, stages["dead dcp"].err
    iteration = stages["dead"].json["iteration"]
    reader = dcp.FileSystemReader(stages["exports"] / "dead.dcp")
    known = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    own = torch.load(stages["own"] / f"{iteration}.0", weights_only=True)
    for name, tensor in own["model"].items():
        assert torch.equal(state[f"model.{name}"], tensor), name


def test_from_one_nodes_memory(stages: dict[str, Any]) -> None:
    for name in ("directory", "one left"):
        plan = stages[name].json
        assert plan["iteration"] == stages["dead"].json["iteration"] or name == "directory"
        assert sorted(rank["tier"] for rank in plan["ranks"]) == ["local memory", "peer memory"]
    check_export(stages, "one.pt", stages["one left"].json["iteration"])


def test_damaged_memory_is_left_out(stages: dict[str, Any]) -> None:
    plan = stages["damaged"].json
    assert plan["source"] == "durable" and plan["iteration"] % 20 == 0
    assert plan["refused"] and all("checksum" in slot["problem"] for slot in plan["refused"])
    check_export(stages, "damaged.pt", plan["iteration"])


def test_from_the_durable_tier_alone(stages: dict[str, Any]) -> None:
    plan = stages["durable"].json
    assert plan["source"] == "durable" and {rank["tier"] for rank in plan["ranks"]} == {"durable"}
    check_export(stages, "durable.pt", plan["iteration"])


def test_a_sharded_job_is_exported_whole(tmp_path: Path) -> None:
    with LocalCluster(nodes=1, workers_per_node=2, echo=False) as cluster:
        job = Run(cluster, 2)
        job.start("--fsdp", options=[f"--durable={tmp_path / 'durable'}", "--durable-interval=1h"])
        assert cluster.wait(PATIENCE) == [0], cluster.tail()
        done = ask(cluster, "recover", tmp_path / "durable", "--to", tmp_path / "whole.pt")
        assert done.code == 0, done.err
        found = torch.load(tmp_path / "whole.pt", weights_only=True)
        parts = [torch.load(job.out / f"{rank}.pt", weights_only=True) for rank in range(2)]
        assert found["iteration"] == runs.STEPS
        for name in parts[0]["model"]:
            assert torch.equal(found["model"][name], torch.cat([part["model"][name] for part in parts])), name
