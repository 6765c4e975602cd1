"""The two-phase protocol between agents, with real memory and a real directory; only the network is a fake."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "durable"))
from slotkit import make_slot, random_tensor

from gemini_run.agent.persister import RPC_UPLOAD, Persister
from gemini_run.agent.runtime import PeerNode
from gemini_run.agent.server import AgentServer
from gemini_run.config import Settings
from gemini_run.durable import checkpoint
from gemini_run.durable.filesystem import FilesystemTier
from gemini_run.errors import DurableError, PeerLost
from gemini_run.memory.beacons import Beacon, BeaconState
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import Slot


@dataclasses.dataclass(frozen=True)
class Peer:
    node_id: str
    local_world_size: int


@dataclasses.dataclass(frozen=True)
class Round:
    number: int
    node_rank: int
    nodes: tuple[Peer, ...]

    @property
    def world_size(self) -> int:
        return sum(peer.local_world_size for peer in self.nodes)


@dataclasses.dataclass
class Rendezvous:
    round: Round | None = None


class Server:
    def __init__(self):
        self.handlers = {}

    def rpc(self, name, handler):
        self.handlers[name] = handler


class Node:
    """An agent without torch elastic around it: memory, events, persister."""

    def __init__(self, network, base, durable, rank, **settings):
        self.settings = Settings(durable=str(durable), **settings)
        self.run_id = "run"
        self.memory = NodeMemory.claim("run", base / f"shm{rank}")
        self.server = Server()
        self.events = []
        self.rank = rank
        self.rendezvous = Rendezvous()
        self.tier = Tier(str(durable))
        self.changed = threading.Condition()
        self.persister = Persister(self, self.rendezvous, call=network.call, tier=self.tier)

    def event(self, event, **fields):
        with self.changed:
            self.events.append((event, fields))
            self.changed.notify_all()

    def wait_for(self, name, count=1):
        def there():
            return sum(event == name for event, _ in self.events) >= count

        with self.changed:
            assert self.changed.wait_for(there, 60), (name, self.events)
        return [fields for event, fields in self.events if event == name][count - 1]

    def slot(self, iteration, *, hold, round=1, index=None, committed=None):
        """What the workers do: one slot per rank, the commit, the beacon."""
        path = self.memory.paths.slot(self.rank, iteration if index is None else index)
        tensors = {"model.w": random_tensor((50, 7), iteration), "rng": torch.full((5,), self.rank)}
        make_slot(path, tensors, owner=self.rank, world_size=2, iteration=iteration, hold=hold, round=round)
        self.beacon(iteration if committed is None else committed)
        return path

    def beacon(self, committed):
        beacon = Beacon(self.memory.paths.beacon(0), writable=True)
        beacon.write(BeaconState(1, "training", committed, committed, committed, 1.0, 0.0, 0, 0.0))
        beacon.close()


class Tier(FilesystemTier):
    fail: Exception | None = None
    gate: threading.Event | None = None
    entered: threading.Event | None = None

    def put_file(self, name, source, stop=None):
        if name.endswith(".distcp"):
            if self.entered is not None:
                self.entered.set()
            while self.gate is not None and not self.gate.wait(0.01):
                self._check(stop)
            if self.fail is not None:
                error, self.fail = self.fail, None
                raise error
        super().put_file(name, source, stop)


class Network:
    def __init__(self):
        self.nodes = {}
        self.dead = set()
        self.calls = []

    def call(self, peer, name, payload):
        self.calls.append(name)
        if peer.node_id in self.dead:
            raise PeerLost(f"{peer.node_id} does not answer")
        return self.nodes[peer.node_id].server.handlers[name](payload)


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def cluster(network, tmp_path):
    nodes = [Node(network, tmp_path, tmp_path / "durable", r, durable_timeout=30.0) for r in range(2)]
    network.nodes = {node.memory.node_id: node for node in nodes}
    form(nodes, 1)
    yield nodes
    for node in nodes:
        node.persister.close()
        node.memory.release(remove=True)


def form(nodes, number, ids=None):
    peers = tuple(Peer(i or node.memory.node_id, 1) for node, i in zip(nodes, ids or [None] * len(nodes), strict=True))
    for rank, node in enumerate(nodes):
        node.rendezvous.round = Round(number, rank, peers)
        node.persister.on_round()


def held(path):
    slot = Slot(path)
    hold = slot.header().hold
    slot.close()
    return hold


def eventually(condition):
    """The sweep has no event of its own: look until it is done, within a generous limit."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_held_committed_iteration_is_persisted(cluster, tmp_path):
    root, other = cluster
    paths = [other.slot(5, hold=True), root.slot(5, hold=True)]
    fields = root.wait_for("persisted")
    assert fields["iteration"] == 5
    assert fields["bytes"] > 1400
    assert fields["location"] == str(tmp_path / "durable")
    assert fields["seconds"] >= 0
    assert checkpoint.verify(root.tier, 5).world_size == 2
    eventually(lambda: not any(held(path) for path in paths))
    assert root.persister.durable == 5
    eventually(lambda: other.persister.durable == 5)


def test_nothing_is_persisted_before_the_commit(cluster):
    root, other = cluster
    other.slot(5, hold=True, committed=4)
    root.slot(5, hold=True, committed=4)
    other.slot(6, hold=True)
    root.slot(6, hold=True)
    assert root.wait_for("persisted")["iteration"] == 6
    assert checkpoint.committed(root.tier) == [6]


def test_a_failure_costs_one_checkpoint_only(cluster, capfd):
    root, other = cluster
    other.tier.fail = DurableError("the disk is full")
    paths = [other.slot(5, hold=True), root.slot(5, hold=True)]
    fields = root.wait_for("persist_failed")
    assert fields["iteration"] == 5
    assert fields["failures"] == 1
    assert "the disk is full" in fields["error"]
    eventually(lambda: not any(held(path) for path in paths))
    other.slot(6, hold=True)
    root.slot(6, hold=True)
    assert root.wait_for("persisted")["iteration"] == 6
    assert root.persister.failures == 0
    eventually(lambda: checkpoint.committed(root.tier) == [6])
    eventually(lambda: not root.tier.list("it-0000000005"))
    error = capfd.readouterr().err
    assert error.count("durable checkpoint of iteration 5 failed (1 in a row)") == 1


def test_a_lost_peer_fails_the_attempt(cluster, network):
    root, other = cluster
    network.dead.add(other.memory.node_id)
    path = root.slot(5, hold=True)
    assert "does not answer" in root.wait_for("persist_failed")["error"]
    eventually(lambda: not held(path))
    assert checkpoint.committed(root.tier) == []


def test_a_rank_without_the_slot_fails_the_attempt(cluster):
    root, _ = cluster
    root.slot(5, hold=True)
    assert "no slot of rank 1 at iteration 5" in root.wait_for("persist_failed")["error"]


def test_a_job_that_went_back_behind_a_checkpoint_stores_its_own(cluster):
    root, other = cluster
    for count, iteration in enumerate((5, 6), 1):
        other.slot(iteration, hold=True)
        root.slot(iteration, hold=True)
        root.wait_for("persisted", count)
    eventually(lambda: not held(root.memory.paths.slot(0, 6)))
    form(cluster, 2)  # both turned out unusable, say: training began again further back
    for count, iteration in enumerate((3, 4, 5), 3):
        other.slot(iteration, hold=True, round=2)
        root.slot(iteration, hold=True, round=2)
        assert root.wait_for("persisted", count)["iteration"] == iteration
    eventually(lambda: checkpoint.committed(root.tier) == [6, 5, 4])
    checkpoint.verify(root.tier, 5)
    assert checkpoint.read_record(root.tier, 5, 0).round == 2
    assert checkpoint.newest_committed(root.tier, below=6) == 5


def test_retention(cluster):
    root, other = cluster
    for count, iteration in enumerate((1, 2, 3), 1):
        other.slot(iteration, hold=True)
        root.slot(iteration, hold=True)
        root.wait_for("persisted", count)
    eventually(lambda: checkpoint.committed(root.tier) == [3, 2])


def test_holds_of_an_older_round_are_cleared(cluster):
    root, other = cluster
    form(cluster, 3)
    paths = [root.slot(5, hold=True, round=2), other.slot(5, hold=True, round=2)]
    eventually(lambda: not any(held(path) for path in paths))
    assert root.events == []


def test_an_upload_goes_on_over_a_new_round_of_the_same_nodes(cluster):
    root, other = cluster
    other.tier.gate, other.tier.entered = threading.Event(), threading.Event()
    other.slot(5, hold=True)
    root.slot(5, hold=True)
    assert other.tier.entered.wait(60)
    form(cluster, 2)
    other.tier.gate.set()
    assert root.wait_for("persisted")["iteration"] == 5


def test_an_upload_ends_when_a_node_was_replaced(cluster):
    root, other = cluster
    other.tier.gate, other.tier.entered = threading.Event(), threading.Event()
    other.slot(5, hold=True)
    root.slot(5, hold=True)
    assert other.tier.entered.wait(60)
    form(cluster, 2, ids=[None, "newcomer"])
    root.wait_for("persist_failed")
    assert checkpoint.committed(root.tier) == []


def finish(nodes, success=True):
    threads = [threading.Thread(target=node.persister.finish, args=(success,)) for node in reversed(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("success", [True, False])
def test_finish_persists_the_last_committed_iteration(cluster, capfd, success):
    root, other = cluster
    other.slot(9, hold=False)
    root.slot(9, hold=False)
    finish(cluster, success)
    assert checkpoint.newest_committed(FilesystemTier(root.tier.location)) == 9
    assert capfd.readouterr().err.count("newest durable checkpoint: iteration 9 in ") == 2


def test_finish_of_one_node_alone_is_served_by_the_root(cluster):
    root, other = cluster
    other.slot(9, hold=False)
    root.slot(9, hold=False)
    other.persister.finish(success=False)
    assert root.wait_for("persisted")["iteration"] == 9
    assert other.persister.durable == 9


def test_finish_is_bounded_and_says_so(cluster, capfd):
    """Case A25: the wait for the last upload has a bound; within it, durable/test_slow.py."""
    root, other = cluster
    for node in cluster:
        node.settings = dataclasses.replace(node.settings, durable_timeout=0.2)
    other.tier.gate = threading.Event()
    other.slot(9, hold=False)
    root.slot(9, hold=False)
    finish(cluster)
    error = capfd.readouterr().err
    assert "iteration 9 did not reach the durable tier" in error
    assert "not uploaded within 0.2 s (--durable-timeout)" in error
    assert "no durable checkpoint was made" in error
    assert checkpoint.committed(FilesystemTier(root.tier.location)) == []


def test_finish_without_the_root_does_not_wait(cluster, network, capfd):
    root, other = cluster
    other.slot(9, hold=False)
    network.dead.add(root.memory.node_id)
    other.persister.finish(success=True)
    assert "the agent that leads the upload has ended" in capfd.readouterr().err


def test_finish_uploads_nothing_twice(cluster, network):
    root, other = cluster
    other.slot(5, hold=True)
    root.slot(5, hold=True)
    root.wait_for("persisted")
    uploads = network.calls.count(RPC_UPLOAD)
    finish(cluster)
    assert network.calls.count(RPC_UPLOAD) == uploads == 1


def test_over_real_agent_servers(tmp_path):
    nodes = [Node(Network(), tmp_path, tmp_path / "durable", r, durable_timeout=30.0) for r in range(2)]
    servers = [AgentServer(node.memory, "run", host="127.0.0.1") for node in nodes]
    try:
        for node, server in zip(nodes, servers, strict=True):
            node.server = server
            node.persister = Persister(node, node.rendezvous, tier=node.tier)
            server.start()
        peers = tuple(
            PeerNode(node.memory.node_id, "h", "127.0.0.1", server.port, 1, server.own_token)
            for node, server in zip(nodes, servers, strict=True)
        )
        for rank, node in enumerate(nodes):
            node.rendezvous.round = Round(1, rank, peers)
            node.persister.on_round()
        for node in reversed(nodes):
            node.slot(5, hold=True)
        assert nodes[0].wait_for("persisted")["iteration"] == 5
        for node in reversed(nodes):
            node.slot(6, hold=False)
        finish(nodes)
        assert checkpoint.newest_committed(FilesystemTier(str(tmp_path / "durable"))) == 6
    finally:
        for node, server in zip(nodes, servers, strict=True):
            node.persister.close()
            server.stop()
            node.memory.release(remove=True)


def test_without_a_durable_tier_it_does_nothing(network, tmp_path):
    class Bare:
        settings = Settings()
        memory = None
        server = Server()

    persister = Persister(Bare(), Rendezvous(), call=network.call)
    persister.on_round()
    persister.finish(success=True)
    persister.close()
    assert Bare.server.handlers == {}
    assert persister.durable is None
