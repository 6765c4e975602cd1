"""Real torch rendezvous handlers over a TCPStore, real servers and memory: several nodes as threads."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torch_dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _RendezvousState,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from gemini_run.agent import address
from gemini_run.agent import rendezvous as rendezvous_module
from gemini_run.agent import server as server_module
from gemini_run.agent.address import advertised_address
from gemini_run.agent.rendezvous import GeminiRendezvous
from gemini_run.agent.runtime import NodeRuntime, PeerNode, RoundInfo
from gemini_run.agent.server import AgentServer, call
from gemini_run.config import Settings
from gemini_run.errors import CallerLate, ConfigError, Unrecoverable
from gemini_run.journal import read_events
from gemini_run.memory.beacons import Beacon, BeaconState
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import Slot
from gemini_run.testing.slotfiles import write_slot
from gemini_run.wire import RunPaths
from gemini_run.worker.export import export_dcp

PATIENCE = 60.0  #: seconds after which a test counts as hung


def readable(descriptor: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1e3))


class Node:
    """One node: memory, server and rendezvous, as the agent puts them together."""

    def __init__(self, run_id: str, inner: RendezvousHandler, base: Path, settings: Settings, paths: RunPaths) -> None:
        self.memory = NodeMemory.claim(run_id, base)
        self.server = AgentServer(self.memory, run_id)
        self.server.start()
        self.inner = inner
        self.runtime = NodeRuntime(settings, run_id, paths, self.memory, self.server)
        self.rendezvous = GeminiRendezvous(inner, self.runtime, 1)
        self.info: RendezvousInfo | None = None

    @property
    def round(self) -> RoundInfo:
        assert self.rendezvous.round is not None, "no round has formed"
        return self.rendezvous.round

    def next(self) -> RoundInfo:
        self.info = self.rendezvous.next_rendezvous()
        return self.round

    def slot(self, owner: int, iteration: int, world_size: int, *, round: int = 0) -> None:
        write_slot(
            self.memory.paths.slot(owner, iteration % 2),
            iteration=iteration,
            tensors={"w": bytes([owner]) * 5000},
            owner=owner,
            world_size=world_size,
            round=round,
        )

    def finished(self, iteration: int) -> None:
        beacon = Beacon(self.memory.paths.beacon(0), writable=True)
        beacon.write(BeaconState(1, "training", iteration, iteration, iteration, time.time(), 0.0, 1, 0.0))
        beacon.close()

    def dies(self) -> None:
        """As a killed agent: no farewell, no heartbeat, its port closed, its memory gone."""
        if isinstance(self.inner, DynamicRendezvousHandler):
            self.inner._stop_heartbeats()
        self.rendezvous._monitor.stop()
        farewell, server_module.LEFT = server_module.LEFT, b""
        self.server.stop()
        server_module.LEFT = farewell
        self.memory.release(remove=True)

    def wakes(self) -> bool:
        return readable(self.rendezvous.wake_fd, PATIENCE)

    def ends(self) -> None:
        self.rendezvous._monitor.stop()
        if isinstance(self.inner, DynamicRendezvousHandler):
            self.inner._stop_heartbeats()
        self.server.stop()
        self.memory.release(remove=True)


class Job:
    def __init__(self, tmp_path: Path, num_nodes: int, least: int | None = None) -> None:
        self.paths = RunPaths(tmp_path / "run")
        self.paths.root.mkdir()
        self._base = tmp_path
        self._num_nodes = num_nodes
        self._least = least or num_nodes
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pool = ThreadPoolExecutor(8)
        self.nodes: list[Node] = []

    def node(self, settings: Settings | None = None) -> Node:
        """A fresh node. Nodes are told apart by torch through a counter, so they may share the process."""
        store = dist.TCPStore("127.0.0.1", self._store.port, is_master=False, wait_for_workers=False)
        inner = DynamicRendezvousHandler.from_backend(
            "job", store, C10dRendezvousBackend(store, "job"), self._least, self._num_nodes,
            local_addr="127.0.0.1", timeout=RendezvousTimeout(),
        )  # fmt: skip
        node = Node("job", inner, self._base, settings or Settings(), self.paths)
        self.nodes.append(node)
        return node

    def start(self, *nodes: Node) -> list[Future[RoundInfo]]:
        return [self._pool.submit(node.next) for node in nodes]

    def form(self, *nodes: Node) -> list[RoundInfo]:
        return [future.result(PATIENCE) for future in self.start(*nodes)]

    def events(self, name: str) -> list[dict[str, object]]:
        return [event for event in read_events(self.paths.events) if event["event"] == name]

    def close(self) -> None:
        for node in self.nodes:
            with contextlib.suppress(RuntimeError):
                node.ends()
        self._pool.shutdown(wait=False)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    jobs: list[Job] = []

    def make(num_nodes: int, least: int | None = None) -> Job:
        jobs.append(Job(tmp_path, num_nodes, least))
        return jobs[-1]

    yield make
    for each in jobs:
        each.close()


def ids(nodes: Sequence[Node]) -> list[str]:
    return [node.memory.node_id for node in nodes]


def by_rank(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.round.node_rank)


def test_a_first_round(job: Callable[[int], Job], capfd: pytest.CaptureFixture[str]) -> None:
    run = job(2)
    a, b = run.node(), run.node()
    rounds = run.form(a, b)
    assert [r.number for r in rounds] == [0, 0]
    assert {r.node_rank for r in rounds} == {0, 1}
    assert rounds[0].nodes == rounds[1].nodes
    assert [peer.node_id for peer in rounds[0].nodes] == ids(by_rank([a, b]))
    assert {(r.plan.source, r.restore_source, r.lost_iterations) for r in rounds} == {("none", "none", 0)}
    assert a.server.token == b.server.token
    assert capfd.readouterr().err.count("fresh start (no checkpoint found)") == 1
    assert not run.events("fell_back")
    context = a.rendezvous.worker_context()
    assert (context.round, context.replicas, context.restore_iteration) == (0, 2, None)
    assert (context.store_host, context.store_port) == (a.round.store_host, a.round.store_port)
    assert a.rendezvous.num_nodes_waiting() == b.rendezvous.num_nodes_waiting() == 0


def test_five_rounds_in_a_row_have_fresh_stores_and_sticky_ranks(job: Callable[[int], Job]) -> None:
    run = job(2)
    nodes = [run.node(), run.node()]
    ranks, ports = [], []
    for number in range(5):
        rounds = run.form(*nodes)
        assert [r.number for r in rounds] == [number, number]
        ranks.append([r.node_rank for r in rounds])
        ports.append(rounds[0].store_port)
        for node in nodes:
            assert node.info is not None and node.info.bootstrap_store_info is not None
            assert node.info.bootstrap_store_info.master_port == rounds[0].store_port
            assert not node.info.store.check(["of-an-earlier-round"])
        first = by_rank(nodes)[0].info
        assert first is not None
        first.store.set("of-an-earlier-round", "x")
        last = by_rank(nodes)[1].info
        assert last is not None and last.store.get("of-an-earlier-round") == b"x"
    assert all(r == ranks[0] for r in ranks)
    assert len(run.events("round_started")) == 10


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_a_newcomer_takes_the_lost_rank_and_pulls_its_shard(job: Callable[[int], Job], lost_rank: int) -> None:
    run = job(2)
    nodes = [run.node(), run.node()]
    run.form(*nodes)
    for node in nodes:  # both hold both shards, as after a commit with two replicas
        node.slot(0, 7, 2)
        node.slot(1, 7, 2)
        node.finished(8)
    dead, survivor = by_rank(nodes)[lost_rank], by_rank(nodes)[1 - lost_rank]
    dead.dies()
    assert survivor.wakes()
    assert survivor.rendezvous.num_nodes_waiting() > 0
    newcomer = run.node()
    new, old = run.form(newcomer, survivor)
    assert (new.node_rank, old.node_rank) == (lost_rank, 1 - lost_rank)
    assert (new.number, old.number) == (1, 1)
    assert (new.plan.iteration, new.restore_source, old.restore_source) == (7, "peer", "local")
    assert old.lost_iterations == new.lost_iterations == 1
    pulled = newcomer.memory.find(lost_rank, 7)
    assert pulled is not None and pulled.header is not None and pulled.header.sealed
    [lost] = run.events("node_lost")
    assert (lost["node"], lost["peer"]) == (survivor.memory.node_id, dead.memory.node_id)
    [fetch] = run.events("fetch_done")
    assert (fetch["owner"], fetch["from"]) == (lost_rank, survivor.memory.node_id)
    assert newcomer.memory.notes()["history"] == [[0, 0], [1, 7]]


def test_the_survivor_evicts_a_dead_member_and_needs_no_keep_alive_timeout(job: Callable[[int], Job]) -> None:
    run = job(2)
    nodes = [run.node(), run.node()]
    run.form(*nodes)
    dead, survivor = nodes
    name = survivor.rendezvous._names[dead.memory.node_id]
    dead.dies()
    assert survivor.wakes()
    membership = survivor.rendezvous._membership
    assert membership is not None
    assert membership.evict({name}) == {name}
    assert membership.now().participants == {membership.me}


@pytest.mark.parametrize("late", [10, -10])
def test_nodes_whose_clocks_differ_are_members_as_long_as_they_live(late: int, job: Callable[[int], Job]) -> None:
    made = job(2)
    here, there = made.node(), made.node()
    executor = there.inner._op_executor  # type: ignore[attr-defined]
    keep_alive = executor._keep_alive

    def of_its_own_clock() -> None:
        keep_alive()
        executor._state.last_heartbeats[executor._node] -= timedelta(seconds=late)

    executor._keep_alive = of_its_own_clock
    made.form(here, there)
    membership, holder = here.rendezvous._membership, here.inner._state_holder  # type: ignore[attr-defined]
    assert membership is not None and len(membership.now().participants) == 2
    here.rendezvous._monitor.stop()
    there.inner._stop_heartbeats()  # type: ignore[attr-defined]
    holder._settings = dataclasses.replace(holder._settings, keep_alive_interval=timedelta(seconds=0.2))
    end = time.monotonic() + PATIENCE
    while len(membership.now().participants) == 2:
        assert time.monotonic() < end, "it is dead, and stays a member"
        time.sleep(0.02)


def test_an_evicted_node_that_lives_joins_again(job: Callable[[int], Job]) -> None:
    run = job(2)
    a, b = run.node(), run.node()
    run.form(a, b)
    membership = a.rendezvous._membership
    assert membership is not None
    membership.evict({a.rendezvous._names[b.memory.node_id]})
    assert b.rendezvous.num_nodes_waiting() > 0  # it sees that it is out
    ranks = (a.round.node_rank, b.round.node_rank)
    rounds = run.form(a, b)
    assert tuple(r.node_rank for r in rounds) == ranks
    assert [r.number for r in rounds] == [1, 1]


def test_a_failure_is_announced_to_all_peers(job: Callable[[int], Job]) -> None:
    run = job(3)
    nodes = [run.node() for _ in range(3)]
    run.form(*nodes)
    nodes[0].rendezvous.announce_failure()
    for peer in nodes[1:]:
        assert peer.wakes()
        assert peer.rendezvous.num_nodes_waiting() > 0
    assert nodes[0].rendezvous.num_nodes_waiting() == 0
    rounds = run.form(*nodes)
    assert {r.number for r in rounds} == {1}
    for node in nodes:
        assert not readable(node.rendezvous.wake_fd, 0)
        assert node.rendezvous.num_nodes_waiting() == 0
    assert nodes[1].rendezvous._on_reform({"round": 0}) == {}  # late, of a round that is over
    assert nodes[1].rendezvous.num_nodes_waiting() == 0


def test_a_node_that_dies_while_the_round_forms_sends_the_others_back(
    job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job(2)
    a, b = run.node(), run.node()
    torch_joined = b.inner.next_rendezvous

    class Died(Exception):
        pass

    def dies_after_joining() -> RendezvousInfo:
        torch_joined()
        b.dies()
        raise Died

    monkeypatch.setattr(b.inner, "next_rendezvous", dies_after_joining)
    waiting, dying = run.start(a, b)
    with pytest.raises(Died):
        dying.result(PATIENCE)
    c = run.node()
    [other] = run.form(c)
    assert waiting.result(PATIENCE).nodes == other.nodes
    assert sorted(ids([a, c])) == sorted(peer.node_id for peer in other.nodes)


# --- spares, and jobs of MIN:MAX -------------------------------------------------------------------------------------


def waits_as_spare(run: Job, node: Node) -> None:
    end = time.monotonic() + PATIENCE
    while not any(event["node"] == node.memory.node_id for event in run.events("spare_waiting")):
        assert time.monotonic() < end, "it does not wait as a spare"
        time.sleep(0.02)


def test_spares_take_no_place_of_those_who_re_form_and_the_place_of_one_who_is_lost(
    job: Callable[..., Job],
) -> None:
    run = job(2)
    members = [run.node(), run.node()]
    first = run.form(*members)
    spares = [run.node(), run.node()]
    told: list[bool] = []
    spares[0].rendezvous.on_spare = told.append
    waiting = dict(zip(spares, run.start(*spares), strict=True))
    for spare in spares:
        waits_as_spare(run, spare)
    for _ in range(6):
        assert all(node.rendezvous.num_nodes_waiting() == 0 for node in members)
        again = run.form(*members)
        assert [r.node_rank for r in again] == [r.node_rank for r in first]
    assert told == [True]

    by_rank(members)[1].dies()
    survivor = by_rank(members)[0]
    assert survivor.wakes()
    [old] = run.form(survivor)
    chosen = next(spare for spare in spares if spare.memory.node_id in {node.node_id for node in old.nodes})
    assert waiting.pop(chosen).result(PATIENCE).node_rank == 1
    assert old.node_rank == 0
    if chosen is spares[0]:
        assert told == [True, False]
    [other] = waiting
    assert not waiting[other].done()
    other.inner.set_closed()


def test_a_job_that_may_shrink_goes_on_with_fewer_and_grows_again(job: Callable[..., Job]) -> None:
    """Without torch's last call of 30 s, which this would count as hung."""
    run = job(3, least=1)
    settings = Settings(shrink_after=0.3)
    nodes = [run.node(settings) for _ in range(3)]
    run.form(*nodes)
    lost = by_rank(nodes)[1]
    stay = [node for node in nodes if node is not lost]
    ranks = {node: node.round.node_rank for node in stay}
    lost.dies()
    assert all(node.wakes() for node in stay)
    began = time.monotonic()
    rounds = run.form(*stay)
    assert time.monotonic() - began < 15, "torch's last call was waited for"
    assert {r.num_nodes for r in rounds} == {2} and {r.number for r in rounds} == {1}
    order = sorted(stay, key=lambda node: ranks[node])
    assert [node.round.node_rank for node in order] == [0, 1]

    newcomer = run.node(settings)
    [coming] = run.start(newcomer)
    end = time.monotonic() + PATIENCE
    while not all(node.rendezvous.num_nodes_waiting() for node in stay):
        assert time.monotonic() < end, "the newcomer is not seen"
        time.sleep(0.02)
    rounds = run.form(*stay)
    assert coming.result(PATIENCE).node_rank == 2
    assert {r.num_nodes for r in rounds} == {3} and {r.number for r in rounds} == {2}


def test_a_lost_node_may_be_replaced_before_the_job_shrinks(job: Callable[..., Job]) -> None:
    run = job(2, least=1)
    settings = Settings(shrink_after=3600)
    nodes = [run.node(settings), run.node(settings)]
    run.form(*nodes)
    nodes[1].dies()
    assert nodes[0].wakes()
    [waiting] = run.start(nodes[0])
    time.sleep(0.5)
    assert not waiting.done()
    newcomer = run.node(settings)
    [new] = run.form(newcomer)
    assert new.num_nodes == waiting.result(PATIENCE).num_nodes == 2


def test_a_node_that_its_peers_gave_up_comes_back_as_a_newcomer(job: Callable[..., Job]) -> None:
    run = job(2)
    a, b = run.node(), run.node()
    run.form(a, b)
    membership = a.rendezvous._membership
    assert membership is not None
    membership.evict({a.rendezvous._names[b.memory.node_id]})
    spare = run.node()
    a_waits, spare_waits = run.start(a, spare)
    assert a_waits.result(PATIENCE).nodes == spare_waits.result(PATIENCE).nodes
    assert b.rendezvous.num_nodes_waiting() > 0
    [back] = run.start(b)
    waits_as_spare(run, b)
    assert [e["node"] for e in run.events("node_returned")] == [b.memory.node_id]
    assert b.rendezvous.round is None, "what it believed of its peers and its rank is void"
    # Late: of a round that the others have left.
    with pytest.raises(CallerLate, match="late: of round 0, this node is in 1"):
        call(peer_of(a), "reform", {"round": 0}, a.server.token, PATIENCE, generation=0)
    assert a.rendezvous.num_nodes_waiting() == 0
    assert not back.done()
    b.inner.set_closed()


def test_copies_that_cannot_be_kept_apart_are_said_once(
    job: Callable[..., Job], capfd: pytest.CaptureFixture[str]
) -> None:
    run = job(3)
    nodes = [run.node(Settings(failure_domain=domain)) for domain in ("a", "a", "a")]
    for _ in range(2):
        run.form(*nodes)
    [said] = run.events("placement_shares_domain")
    assert capfd.readouterr().err.count("warning: placement of copies: ") == 1
    assert said["round"] == 0 and said["unavoided"]
    assert all(node.rendezvous.worker_context().failure_domains == ("a", "a", "a") for node in nodes)


def peer_of(node: Node) -> PeerNode:
    return node.rendezvous._myself()


def test_what_another_world_left_outlives_a_round_that_goes_on_from_its_own(job: Callable[..., Job]) -> None:
    """Iteration 6 of two ranks may have no replicas yet: 5 of three ranks is what there is if a node is lost now."""
    run = job(2)
    nodes = [run.node(), run.node()]
    run.form(*nodes)
    for rank, node in enumerate(by_rank(nodes)):
        for owner in range(3):
            node.slot(owner, 5, 3)
        node.slot(rank, 6, 2)
    plans = [r.plan for r in run.form(*nodes)]
    assert {(plan.iteration, plan.world_size) for plan in plans} == {(6, 2)}
    for rank, node in enumerate(by_rank(nodes)):
        for owner in range(3):
            assert node.memory.find(owner, 5, 3)
        assert node.memory.find(rank, 6, 2)
    by_rank(nodes)[1].dies()
    survivor = by_rank(nodes)[0]
    assert survivor.wakes()
    [old, _] = run.form(survivor, run.node())
    assert (old.plan.source, old.plan.iteration, old.plan.world_size) == ("memory", 5, 3)


def test_who_was_away_asks_the_durable_tier_what_it_missed(job: Callable[..., Job], tmp_path: Path) -> None:
    """Its memory holds a whole iteration, of long ago."""
    run = job(2)
    location = tmp_path / "durable"
    location.mkdir()
    settings = Settings(durable=str(location))
    nodes = [run.node(settings), run.node(settings)]
    run.form(*nodes)
    for node in nodes:
        for owner in range(2):
            node.slot(owner, 6, 2)
    newer = {owner: tmp_path / f"newer{owner}" for owner in range(2)}
    for owner, path in newer.items():
        write_slot(path, iteration=50, tensors={"w": bytes([owner]) * 5000}, owner=owner, world_size=2)
    export_dcp(newer, location, run_id="job", now=0.0)
    assert {r.plan.source for r in run.form(*nodes)} == {"memory"}, "they were there all the time"
    for node in nodes:
        node.rendezvous.round = None  # as of an agent that has come back after others took the places
    assert {(r.plan.source, r.plan.iteration) for r in run.form(*nodes)} == {("durable", 50)}


def test_all_copies_of_a_rank_lost_without_a_durable_tier(
    job: Callable[[int], Job], capfd: pytest.CaptureFixture[str]
) -> None:
    run = job(2)
    settings = Settings(replicas=1)
    nodes = [run.node(settings), run.node(settings)]
    run.form(*nodes)
    dead, survivor = by_rank(nodes)
    survivor.slot(1, 46, 2)
    survivor.slot(1, 47, 2)
    survivor.finished(47)
    dead.dies()
    assert survivor.wakes()
    new, old = run.form(run.node(settings), survivor)
    assert (new.plan.source, old.lost_iterations) == ("none", 47)
    err = capfd.readouterr().err
    assert "all in-memory copies of rank(s) 0 are lost: starting from scratch" in err
    event = run.events("fell_back")[0]
    assert (event["from"], event["to"], event["lost"]) == (47, None, [0])
    assert not [info for info in survivor.memory.scan() if info.usable]  # nothing that contradicts the fresh start


def test_rounds_that_train_nothing_say_what_is_lost_in_all(
    job: Callable[[int], Job], capfd: pytest.CaptureFixture[str]
) -> None:
    run = job(1)
    node = run.node()
    run.form(node)
    for iteration in (40, 41):
        node.slot(0, iteration, 1)
    node.finished(42)
    [first] = run.form(node)
    assert (first.plan.iteration, first.lost_iterations) == (41, 1)
    # Its worker refuses that slot, and says nothing of iterations: it did not come to any.
    node.finished(0)
    Slot(node.memory.paths.slot(0, 1), writable=True).refuse()
    [second] = run.form(node)
    assert (second.plan.iteration, second.lost_iterations) == (40, 1), "it adds up: 2 in all"
    # Killed before it said anything: the beacon is still that of the round before.
    [again] = run.form(node)
    assert (again.plan.iteration, again.lost_iterations) == (40, 0)
    Slot(node.memory.paths.slot(0, 0), writable=True).refuse()
    [third] = run.form(node)
    assert (third.plan.source, third.lost_iterations) == ("none", 40)
    assert run.events("fell_back")[0]["lost_iterations"] == 42
    said = [line for line in capfd.readouterr().err.splitlines() if "round" in line or "scratch" in line]
    words = ("1 iteration(s)", "2 iteration(s)", "42 iterations lost")
    assert [word for line in said for word in words if word in line] == [words[0], words[1], words[1], words[2]]
    # Trained again since: what was lost before is made good, or lost with what comes now.
    node.finished(5)
    [fourth] = run.form(node)
    assert fourth.lost_iterations == 5


def test_when_the_durable_tier_was_last_fed_is_known_to_whoever_leads_next(job: Callable[[int], Job]) -> None:
    run = job(2)
    nodes = [run.node(), run.node()]
    before = time.time()
    run.form(*nodes)
    began = {node.rendezvous.worker_context().durable_at for node in nodes}
    assert all(before <= at <= time.time() for at in began), "at first it counts from the first round"
    lost, survivor = by_rank(nodes)
    survivor.runtime.durable_at = before + 1000
    lost.dies()
    assert survivor.wakes()
    newcomer = run.node()
    run.form(newcomer, survivor)
    assert newcomer.round.node_rank == 0
    assert newcomer.rendezvous.worker_context().durable_at == before + 1000
    assert survivor.memory.notes()["durable_at"] == before + 1000, "for an agent that takes the memory over"


def test_require_checkpoint_ends_the_job_on_all_nodes(job: Callable[[int], Job]) -> None:
    run = job(2)
    settings = Settings(require_checkpoint=True)
    futures = run.start(run.node(settings), run.node(settings))
    for future in futures:
        with pytest.raises(Unrecoverable, match="--require-checkpoint"):
            future.result(PATIENCE)


def test_more_replicas_than_nodes(job: Callable[[int], Job]) -> None:
    run = job(1)
    [future] = run.start(run.node(Settings(replicas=2)))
    with pytest.raises(ConfigError, match="--replicas 2"):
        future.result(PATIENCE)


def test_a_lost_rendezvous_store_does_not_end_healthy_training(
    job: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = job(1)
    node = run.node()
    run.form(node)

    def gone() -> object:
        raise RendezvousConnectionError("refused")

    monkeypatch.setattr(node.rendezvous._membership, "now", gone)
    assert [node.rendezvous.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert capfd.readouterr().err.count("training goes on") == 1


def test_static_rendezvous_gets_a_fresh_store_each_round(tmp_path: Path) -> None:
    probe = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # keeps the port, multi-tenant
    inner = StaticTCPRendezvous("127.0.0.1", probe.port, 0, 1, "job", 60)
    inner._store = probe
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    node = Node("job", inner, tmp_path, Settings(), paths)
    try:
        rounds = [node.next() for _ in range(3)]
        assert [r.number for r in rounds] == [0, 1, 2]
        assert all(r.store_port != probe.port for r in rounds)
        assert node.rendezvous.num_nodes_waiting() == 0
    finally:
        node.ends()


@pytest.mark.parametrize(
    ("local", "endpoint", "max_nodes", "expected"),
    [
        ("10.1.2.3", "whatever.invalid", 4, "10.1.2.3"),
        ("localhost", "localhost", 2, "localhost"),
        (os.uname().nodename, None, 1, "127.0.0.1"),
        (os.uname().nodename, "127.0.0.1", 2, "127.0.0.1"),
    ],
)
def test_advertised_address(local: str, endpoint: str | None, max_nodes: int, expected: str) -> None:
    assert advertised_address(local, endpoint, max_nodes) == expected


def test_a_name_that_is_loopback_only_here_is_not_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"head-node": "127.0.1.1", address.ADDRESS_OF_NOBODY: "10.9.8.7"}
    monkeypatch.setattr(address, "_own_address_towards", routes.get)
    assert advertised_address(os.uname().nodename, "head-node", 2) == "10.9.8.7"
    del routes[address.ADDRESS_OF_NOBODY]
    with pytest.raises(ConfigError, match="--local-addr"):
        advertised_address(os.uname().nodename, "head-node", 2)


def test_what_membership_relies_on_in_torch() -> None:
    assert set(vars(_RendezvousState())) == {
        "round", "complete", "deadline", "closed", "participants", "wait_list", "redundancy_list", "last_heartbeats",
    }  # fmt: skip
    assert list(inspect.signature(torch_dynamic._remove_participant_epilogue).parameters) == ["state", "settings"]
    assert "_delay(seconds=1)" in inspect.getsource(_DistributedRendezvousOpExecutor.run)
    assert "self._cache_duration > 0" in inspect.getsource(_BackendRendezvousStateHolder.sync)
    assert "self._sanitize()" in inspect.getsource(_BackendRendezvousStateHolder.sync)
    assert "in state.last_heartbeats.items()" in inspect.getsource(_BackendRendezvousStateHolder._sanitize)
    assert "def _keep_alive(self)" in inspect.getsource(_DistributedRendezvousOpExecutor)
    source = inspect.getsource(DynamicRendezvousHandler)
    for name in ("self._this_node", "self._heartbeat_lock", "self._state_holder", "self._op_executor", "self._store"):
        assert f"{name} = " in source, name
    assert inspect.getsource(DynamicRendezvousHandler.next_rendezvous).index("_stop_heartbeats") > 0
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in inspect.getsource(DynamicRendezvousHandler.next_rendezvous)
    fields = {field.name for field in dataclasses.fields(torch_dynamic.RendezvousSettings)}
    assert {"keep_alive_interval", "keep_alive_max_attempt", "max_nodes", "min_nodes", "timeout"} <= fields
    assert "_RendezvousJoinOp()" in source
    assert list(inspect.signature(torch_dynamic._RendezvousJoinOp.__call__).parameters) == ["self", "ctx", "deadline"]
    assert {"SYNC", "KEEP_ALIVE", "MARK_RENDEZVOUS_COMPLETE", "ADD_TO_REDUNDANCY_LIST",
            "REMOVE_FROM_REDUNDANCY_LIST"} <= set(torch_dynamic._Action.__members__)  # fmt: skip
    assert list(inspect.signature(torch_dynamic._should_keep_alive).parameters) == ["ctx"]
    assert isinstance(torch_dynamic.RendezvousTimeout().last_call, timedelta)


def test_threads_that_rendezvous_side_by_side_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them set would otherwise be what another puts back."""
    store = rendezvous_module._private_store
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv(store.NAME, raising=False)
        else:
            monkeypatch.setenv(store.NAME, before)
        with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
            first.enter_context(store)
            second.enter_context(store)
            first.close()
            assert os.environ[store.NAME] == "1", "the second is still at it"
        assert os.environ.get(store.NAME) == before
