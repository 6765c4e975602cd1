"""A job goes on with another number of ranks: what was saved is what the new ranks hold, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gemini_run.agent.reshard import check_copy, tell_workers
from gemini_run.agent.runtime import PeerNode
from gemini_run.agent.server import AgentServer
from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.segment import NodeMemory, durable_refused
from gemini_run.plan.recovery import NodeFacts, RecoveryPlan, SlotFact, plan_recovery
from gemini_run.testing.compare import count_tensors, differences
from gemini_run.testing.processes import free_port
from gemini_run.wire import EXIT_REPLAN, WorkerContext
from gemini_run.worker.export import export_dcp

WORLDS = Path(__file__).with_name("worlds.py")


class Worlds:
    """Nodes with memory and a server, and the process that runs jobs on them; the agents' part is done here."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.process = subprocess.Popen(
            [sys.executable, str(WORLDS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.round = -1
        self.jobs = 0
        self.nodes: list[tuple[NodeMemory, AgentServer]] = []

    def node(self) -> int:
        memory = NodeMemory.claim("test", self.tmp_path / f"memory{len(self.nodes)}")
        server = AgentServer(memory, "test")
        server.start()
        self.nodes.append((memory, server))
        return len(self.nodes) - 1

    def facts(self, nodes: Sequence[int], ranks: int) -> list[NodeFacts]:
        found = []
        for place, index in enumerate(nodes):
            memory = self.nodes[index][0]
            slots = tuple(
                SlotFact(h.owner, h.iteration, h.round, h.world_size, True, h.end)
                for info in memory.scan()
                if info.usable and (h := info.header)
            )
            found.append(NodeFacts(memory.node_id, place, ranks // len(nodes), slots))
        return found

    def run(
        self, kind: str, ranks: int, total: int, *, on: Sequence[int] = (0,), plan: RecoveryPlan | None = None,
        durable: Path | None = None, codes: int = 0,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """What the ranks hold as they end; where the job begins with something, `before` has it afterwards."""
        self.round += 1
        self.jobs += 1
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        out = self.tmp_path / f"out{self.jobs}"
        out.mkdir()
        if plan is not None and plan.world_size != ranks:
            peers = [
                PeerNode(memory.node_id, "h", "127.0.0.1", server.port, ranks // len(on), server.own_token)
                for memory, server in (self.nodes[index] for index in on)
            ]
            for place, index in enumerate(on):
                where = str(durable) if durable else None
                tell_workers(self.nodes[index][0], plan, peers, node_rank=place, number=self.round, durable=where)
        contexts = [
            WorkerContext(
                run_id="test", run_dir=str(self.tmp_path), round=self.round, node_id=f"n{place}", node_rank=place,
                num_nodes=len(on), memory_dir=str(self.nodes[index][0].paths.root), store_host="127.0.0.1",
                store_port=store.port, replicas=1, snapshot_interval=2, durable_iterations=None,
                durable_seconds=None, restore_iteration=plan.iteration if plan else None,
                restore_source=plan.source if plan else "none",
                reshard_from=plan.world_size if plan and plan.world_size != ranks else None,
            ).to_json()
            for place, index in enumerate(on)
        ]  # fmt: skip
        job = {"kind": kind, "ranks": ranks, "total": total, "port": free_port(), "contexts": contexts, "out": str(out)}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert json.loads(self.process.stdout.readline()) == [codes] * ranks
        if codes:
            return []
        self.before = [torch.load(out / f"before.{rank}", weights_only=True) for rank in range(ranks)]
        return [torch.load(out / f"after.{rank}", weights_only=True) for rank in range(ranks)]

    def plan(self, ranks: int, *, on: Sequence[int] = (0,)) -> RecoveryPlan:
        """As the agents make it, copies checked."""
        plan = plan_recovery(self.facts(on, ranks))
        for place, index in enumerate(on):
            for owner, holders in plan.copies:
                if place in holders:
                    check_copy(self.nodes[index][0], plan, owner)
        return plan

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for memory, server in self.nodes:
            server.stop()
            memory.release(remove=True)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """One interpreter for all tests here."""
    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()


@pytest.fixture
def worlds(process: Worlds, tmp_path: Path) -> Iterator[Worlds]:
    process.tmp_path, process.round, process.nodes = tmp_path, -1, []
    process.node()
    yield process
    for memory, server in process.nodes:
        server.stop()
        memory.release(remove=True)


def same(now: dict[str, Any], saved: dict[str, Any], *, generators: bool = True) -> None:
    left_out = () if generators else ("torch", "python")
    mine, theirs = ({k: v for k, v in state.items() if k not in left_out} for state in (now, saved))
    assert count_tensors(theirs["model"]) >= 4 and count_tensors(theirs["optimizer"]) >= 12
    assert not differences(mine, theirs)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("fsdp", (2, 1, 3)), ("ddp", (2, 3)), ("tp", (2, 1, 2))],
)
def test_a_job_goes_on_with_other_numbers_of_ranks(kind: str, sizes: Sequence[int], worlds: Worlds) -> None:
    """Case A48: sharded otherwise, and nothing left of the old world."""
    ended = worlds.run(kind, sizes[0], 4)
    for step, ranks in enumerate(sizes[1:], 1):
        plan = worlds.plan(ranks)
        total = 4 + 3 * step  # snapshots at the first of the three iterations, since the world is new, and the last
        assert (plan.source, plan.iteration, plan.world_size) == ("memory", total - 3, sizes[step - 1])
        ended_before, ended = ended, worlds.run(kind, ranks, total, plan=plan)
        for rank, state in enumerate(worlds.before):
            old = ended_before[rank % len(ended_before)]
            same(state, old, generators=rank < len(ended_before))
        assert ended[0]["iteration"] == total and len(ended[0]["log"]["losses"]) == total
        memory = worlds.nodes[0][0]
        assert all(memory.find(rank, i, ranks) for rank in range(ranks) for i in (total - 2, total))
        # The slots of the old world are written over, or gone with the ranks that there are no more.
        files = list(memory.paths.slots.iterdir())
        assert {int(file.name[1:6]) for file in files} == set(range(ranks)) and len(files) <= 3 * ranks


def test_hsdp_becomes_fsdp_and_fsdp_ddp_and_back(worlds: Worlds) -> None:
    """The same parameters, sharded otherwise or no more: what is whole in one world may be cut in the next."""
    ended = worlds.run("hsdp", 4, 4)
    after = worlds.run("fsdp", 3, 5, plan=worlds.plan(3))
    same(worlds.before[0], ended[0])
    worlds.run("ddp", 2, 6, plan=worlds.plan(2))
    same(worlds.before[1], after[1])
    last = worlds.run("fsdp", 3, 7, plan=worlds.plan(3))
    assert last[0]["iteration"] == 7


def test_shards_come_from_peers(worlds: Worlds) -> None:
    """The old world ran on one node; half of the new one runs on a node that has nothing of it."""
    ended = worlds.run("fsdp", 3, 4)
    other = worlds.node()
    plan = worlds.plan(2, on=(other, 0))
    assert plan.copies == ((0, (1,)), (1, (1,)), (2, (1,)))
    worlds.run("fsdp", 2, 5, on=(other, 0), plan=plan)
    for rank, state in enumerate(worlds.before):
        same(state, ended[rank])


def test_shards_come_from_the_durable_tier(worlds: Worlds) -> None:
    ended = worlds.run("fsdp", 3, 4)
    memory = worlds.nodes[0][0]
    worlds.plan(2)  # makes the slots whole
    paths = {owner: info.path for owner in range(3) if (info := memory.find(owner, 4))}
    scratch = worlds.tmp_path / "durable"
    scratch.mkdir()
    export_dcp(paths, scratch, run_id="test", now=0.0)
    node = worlds.node()
    plan = plan_recovery(worlds.facts((node,), 2), 4, 3)
    assert (plan.source, plan.world_size) == ("durable", 3)
    worlds.run("fsdp", 2, 5, on=(node,), plan=plan, durable=scratch)
    for rank, state in enumerate(worlds.before):
        same(state, ended[rank])


def test_a_damaged_durable_checkpoint_is_not_tried_again(worlds: Worlds) -> None:
    worlds.run("fsdp", 2, 4)
    memory = worlds.nodes[0][0]
    worlds.plan(1)
    paths = {owner: info.path for owner in range(2) if (info := memory.find(owner, 4))}
    scratch = worlds.tmp_path / "durable"
    scratch.mkdir()
    folder = export_dcp(paths, scratch, run_id="test", now=0.0)
    for file in folder.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)
    node = worlds.node()
    plan = plan_recovery(worlds.facts((node,), 1), 4, 2)
    worlds.run("fsdp", 1, 5, on=(node,), plan=plan, durable=scratch, codes=EXIT_REPLAN)
    assert durable_refused(worlds.nodes[node][0].paths) == [4]


def test_a_damaged_shard_is_refused_before_anybody_reads_it_and_when_it_is_read(worlds: Worlds) -> None:
    worlds.run("fsdp", 2, 4)
    memory = worlds.nodes[0][0]
    plan = worlds.plan(1)
    info = memory.find(1, 4)
    assert info is not None and info.header is not None
    with info.path.open("r+b") as file:
        file.seek(info.header.payload_offset)
        file.write(b"\xff" * 8)
    with pytest.raises(ReplicaCorrupt, match="fails its checksum"):
        check_copy(memory, plan, 1)
    worlds.run("fsdp", 1, 5, plan=plan, codes=EXIT_REPLAN)
