"""``gemini-run recover`` and ``status`` on a real job: as it trains, when it is dead, as its copies go one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import runs
import torch
import torch.distributed.checkpoint as dcp
from runs import Run, ask
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gemini_run.testing.compare import count_tensors, differences
from gemini_run.testing.nodes import LocalCluster

pytestmark = pytest.mark.cluster


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

        for node in cluster.nodes:  # at once: one that outlives the store's host for a moment says that the run failed
            node.freeze()
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
        for slot in memories[1].slots.iterdir():
            data = bytearray(slot.read_bytes())
            data[len(data) // 2] ^= 1
            slot.write_bytes(data)
        said["damaged"] = ask(cluster, "recover", "--json")
        said["damaged export"] = ask(cluster, "recover", "--to", exports / "damaged.pt")
        cluster.nodes[1].kill()
        said["durable"] = ask(cluster, "recover", durable, "--json")
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
    """Case A31: readers come and go, the job and its memory stay."""
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
    assert stages["one left"].json["iteration"] == stages["dead"].json["iteration"]


def test_damaged_memory_is_left_out(stages: dict[str, Any]) -> None:
    plan = stages["damaged"].json
    assert plan["source"] == "durable" and plan["iteration"] % 20 == 0
    assert plan["refused"] and all("checksum" in slot["problem"] for slot in plan["refused"])
    check_export(stages, "damaged.pt", plan["iteration"])


def test_from_the_durable_tier_alone(stages: dict[str, Any]) -> None:
    """Case A49: read with torch.load's defaults (`check_export`)."""
    plan = stages["durable"].json
    assert plan["source"] == "durable" and {rank["tier"] for rank in plan["ranks"]} == {"durable"}
    assert plan["iteration"] == stages["damaged"].json["iteration"]
