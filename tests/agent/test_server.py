"""The agent's server as its peers see it, over real sockets; and the monitor that watches it."""

from __future__ import annotations

import http.client
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemini_run.agent.monitor import Monitor
from gemini_run.agent.runtime import PeerNode
from gemini_run.agent.server import BEAT, FINISHED, LEFT, AgentServer, call
from gemini_run.errors import CallerLate, PeerLost, Unrecoverable
from gemini_run.memory.header import SlotHeader
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import Slot
from gemini_run.peers.pull import Source, pull_slot
from gemini_run.plan.health import SILENCE_SECONDS, STALL_SECONDS
from gemini_run.testing.slotfiles import write_slot

PATIENCE = 30.0


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[NodeMemory]:
    node = NodeMemory.claim("run", tmp_path)
    yield node
    node.release(remove=True)


@pytest.fixture
def server(memory: NodeMemory) -> Iterator[AgentServer]:
    each = AgentServer(memory, "run")
    each.start()
    yield each
    each.stop()


def peer_of(server: AgentServer) -> PeerNode:
    return PeerNode("n0", "host", "127.0.0.1", server.port, 1, server.own_token)


def get(server: AgentServer, path: str, token: str | None = "", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    if token is not None:
        headers["Authorization"] = f"Bearer {token or server.token}"
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


# --- tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "wrong", "ünicode"])
@pytest.mark.parametrize("path", ["/v1/slots/0/5", "/v1/watch", "/v1/rpc/x", "/nothing"])
def test_without_the_token_nothing_is_said(server: AgentServer, token: str | None, path: str) -> None:
    encoded = None if token is None else token.encode().decode("latin-1")
    status, body = get(server, path, encoded)
    assert status == 401
    assert b"run" in body and server.token.encode() not in body


def test_the_own_token_and_the_runs_are_accepted(server: AgentServer) -> None:
    own = server.own_token
    server.adopt("of-the-run")
    assert get(server, "/v1/slots/0/5", "of-the-run")[0] == 404
    assert get(server, "/v1/slots/0/5", own)[0] == 404


# --- slots -----------------------------------------------------------------------------------------------


def test_a_slot_is_served_in_ranges(server: AgentServer, memory: NodeMemory) -> None:
    path = memory.paths.slot(3, 0)
    write_slot(path, iteration=5, owner=3, world_size=4, tensors={"w": os.urandom(9000)})
    whole = path.read_bytes()
    assert get(server, "/v1/slots/3/5") == (200, whole)
    assert get(server, "/v1/slots/3/5", Range="bytes=4096-8191") == (206, whole[4096:8192])
    assert get(server, "/v1/slots/3/5", Range=f"bytes={len(whole)}-")[0] == 416
    assert get(server, "/v1/slots/3/6")[0] == 404
    assert get(server, "/v1/slots/2/5")[0] == 404


def test_a_torn_slot_is_not_served(server: AgentServer, memory: NodeMemory) -> None:
    path = memory.paths.slot(0, 0)
    write_slot(path, iteration=5, tensors={"w": b"x" * 100})
    slot = Slot(path, writable=True)
    slot.refuse()
    slot.close()
    assert get(server, "/v1/slots/0/5")[0] == 404


def test_what_a_dead_writer_left_unsealed_is_sealed_first(server: AgentServer, memory: NodeMemory) -> None:
    write_slot(memory.paths.slot(0, 0), iteration=5, tensors={"w": b"x" * 100}, seal=False)
    status, body = get(server, "/v1/slots/0/5")
    assert status == 200
    assert SlotHeader.unpack(body[:4096]).sealed


def test_what_a_living_writer_has_not_sealed_must_be_waited_for(server: AgentServer, memory: NodeMemory) -> None:
    path = memory.paths.slot(0, 0)
    write_slot(path, iteration=5, tensors={"w": b"x" * 100}, seal=False)
    writer = Slot(path, writable=True)
    assert writer.try_lock()
    assert get(server, "/v1/slots/0/5")[0] == 503
    writer.unlock()
    writer.close()
    assert get(server, "/v1/slots/0/5")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/slots/../../etc/passwd",
        "/v1/slots/..%2f..%2fnode.json/1",
        "/v1/slots/0/..%2f..%2fnode.json",
        "/v1/slots/-1/5",
        "/v1/slots/0/5/..",
        "/v1/slots/%30%00/5",
        "/v1/slots/0x0/5",
        "/v1/slots//etc/passwd",
        "/v1/slots/" + "9" * 30 + "/5",
    ],
)
def test_no_path_leads_out_of_the_slots(server: AgentServer, memory: NodeMemory, path: str) -> None:
    write_slot(memory.paths.slot(0, 0), iteration=5, tensors={"w": b"x"})
    assert get(server, path)[0] in (400, 404)


# --- RPC -------------------------------------------------------------------------------------------------


def test_call(server: AgentServer) -> None:
    def add(payload: dict[str, Any]) -> dict[str, Any]:
        return {"sum": payload["a"] + payload["b"], "thread": threading.current_thread().name}

    server.rpc("add", add)
    answer = call(peer_of(server), "add", {"a": 1, "b": 2}, server.token, PATIENCE)
    assert answer["sum"] == 3
    assert answer["thread"].startswith("gemini-rpc")  # never on the event loop


def test_what_comes_of_an_older_round_is_refused(server: AgentServer, memory: NodeMemory) -> None:
    write_slot(memory.paths.slot(0, 0), iteration=5, tensors={"w": b"x" * 5000}, owner=0)
    called: list[int] = []
    server.rpc("note", lambda payload: called.append(payload["round"]) or {})  # type: ignore[func-returns-value]
    server.generation = 3
    for generation, refused in ((2, True), (3, False), (4, False), (None, False)):
        if refused:
            with pytest.raises(CallerLate, match="late: of round 2, this node is in 3"):
                call(peer_of(server), "note", {"round": 2}, server.token, PATIENCE, generation=generation)
        else:
            call(peer_of(server), "note", {"round": generation}, server.token, PATIENCE, generation=generation)
    assert called == [3, 4, None]
    late, present = (Source("127.0.0.1", server.port, server.token, generation=n) for n in (2, 3))
    elsewhere = NodeMemory.claim("other", memory.paths.root.parent.parent)
    with pytest.raises(PeerLost, match="412"):
        pull_slot(elsewhere, 0, 5, late)
    assert pull_slot(elsewhere, 0, 5, present).header.iteration == 5


def test_a_watcher_that_was_stopped_itself_gives_no_verdict_on_its_peers(
    remote: tuple[subprocess.Popen[str], PeerNode],
) -> None:
    process, peer = remote
    verdicts = Verdicts()
    now = [1000.0]
    verdicts.monitor = Monitor(verdicts.monitor._on_lost, clock=lambda: now[0])
    watched(peer, verdicts.monitor)
    process.send_signal(signal.SIGSTOP)  # so that nothing is heard
    now[0] += 60  # this process was not running for a minute
    assert verdicts.monitor._pulse.awake_since() == now[0]
    time.sleep(SILENCE_SECONDS + 1)
    assert verdicts.said.empty()
    for _ in range(8):  # it runs again, and still hears nothing
        now[0] += STALL_SECONDS / 2
        verdicts.monitor._pulse.awake_since()
    node, said = verdicts.next()
    assert node == "n1" and "silent" in said
    verdicts.monitor.stop()


def test_a_blocked_handler_blocks_nobody_else(server: AgentServer) -> None:
    release = threading.Event()
    entered = threading.Event()

    def block(_: dict[str, Any]) -> dict[str, Any]:
        entered.set()
        assert release.wait(PATIENCE)
        return {}

    server.rpc("block", block)
    server.rpc("ping", lambda payload: payload)
    caller = threading.Thread(target=call, args=(peer_of(server), "block", {}, server.token, PATIENCE))
    caller.start()
    assert entered.wait(PATIENCE)
    assert call(peer_of(server), "ping", {"x": [1]}, server.token, PATIENCE) == {"x": [1]}
    release.set()
    caller.join(PATIENCE)


def test_a_handlers_error_reaches_the_caller_in_words(server: AgentServer) -> None:
    def fail(_: dict[str, Any]) -> dict[str, Any]:
        raise Unrecoverable("no copy is left")

    server.rpc("fail", fail)
    server.rpc("bug", lambda payload: payload["missing"])
    with pytest.raises(PeerLost, match=r"n0.*refused 'fail': 409 no copy is left"):
        call(peer_of(server), "fail", {}, server.token, PATIENCE)
    with pytest.raises(PeerLost, match="500"):
        call(peer_of(server), "bug", {}, server.token, PATIENCE)
    with pytest.raises(PeerLost, match="no call 'other'"):
        call(peer_of(server), "other", {}, server.token, PATIENCE)
    with pytest.raises(PeerLost, match="401"):
        call(peer_of(server), "fail", {}, "wrong", PATIENCE)


def test_calling_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(PeerLost, match=f"n9 at 127.0.0.1:{port} did not answer 'x'"):
        call(PeerNode("n9", "h", "127.0.0.1", port, 1), "x", {}, "t", PATIENCE)


def test_calls_before_start_wait(memory: NodeMemory) -> None:
    late = AgentServer(memory, "run")
    late.rpc("ping", lambda payload: payload)
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    caller = threading.Thread(target=lambda: answers.put(call(peer_of(late), "ping", {"a": 1}, late.token, PATIENCE)))
    caller.start()
    late.start()
    assert answers.get(timeout=PATIENCE) == {"a": 1}
    caller.join(PATIENCE)
    late.stop()
    late.stop()


# --- watching --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finished", "farewell"), [(True, FINISHED), (False, LEFT)])
def test_the_watch_stream_beats_and_says_how_it_ends(server: AgentServer, finished: bool, farewell: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.request("GET", "/v1/watch", headers={"Authorization": f"Bearer {server.token}"})
    response = connection.getresponse()
    assert response.read(2) == BEAT * 2
    server.finished = finished
    server.stop()
    assert response.read().lstrip(BEAT) == farewell
    connection.close()


class Verdicts:
    def __init__(self) -> None:
        self.said: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.monitor = Monitor(lambda peer, cause: self.said.put((peer.node_id, cause)))

    def next(self) -> tuple[str, str]:
        return self.said.get(timeout=PATIENCE)


_SERVE = """
import sys
from pathlib import Path
from gemini_run.agent.server import AgentServer
from gemini_run.memory.segment import NodeMemory
server = AgentServer(NodeMemory.claim("run", Path(sys.argv[1])), "run")
server.start()
print(server.port, server.own_token, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], PeerNode]]:
    """An agent's server in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port, token = process.stdout.readline().split()
        try:
            yield process, PeerNode("n1", "host", "127.0.0.1", int(port), 1, token)
        finally:
            process.kill()


def watched(peer: PeerNode, monitor: Monitor) -> None:
    monitor.watch([peer])
    with pytest.raises(PeerLost, match="no call"):  # it answers: its stream has been accepted before this call
        call(peer, "nothing", {}, peer.token, PATIENCE)


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "refused"), (signal.SIGSTOP, "silent")])
def test_a_killed_and_a_frozen_node_are_lost(
    remote: tuple[subprocess.Popen[str], PeerNode], number: signal.Signals, cause: str
) -> None:
    process, peer = remote
    verdicts = Verdicts()
    watched(peer, verdicts.monitor)
    process.send_signal(number)
    node, said = verdicts.next()
    assert node == "n1" and cause in said
    verdicts.monitor.stop()


def test_a_node_that_leaves_is_lost_and_one_that_finishes_is_not(tmp_path: Path) -> None:
    servers = []
    for _ in range(2):
        each = AgentServer(NodeMemory.claim("run", tmp_path), "run")
        each.start()
        servers.append(each)
    verdicts = Verdicts()
    names = ("finishes", "leaves")
    peers = [PeerNode(n, "h", "127.0.0.1", s.port, 1, s.own_token) for n, s in zip(names, servers, strict=True)]
    verdicts.monitor.watch(peers)
    for peer in peers:
        with pytest.raises(PeerLost, match="no call"):
            call(peer, "nothing", {}, peer.token, PATIENCE)
    servers[0].finished = True
    for each in servers:
        each.stop()
    assert verdicts.next() == ("leaves", "its agent was stopped")
    assert verdicts.said.empty()


def test_a_peer_that_is_not_watched_any_more_gets_no_verdict(
    remote: tuple[subprocess.Popen[str], PeerNode], server: AgentServer
) -> None:
    process, peer = remote
    verdicts = Verdicts()
    watched(peer, verdicts.monitor)
    watch = verdicts.monitor._watches[peer]
    verdicts.monitor.watch([])
    process.kill()
    watch._thread.join(PATIENCE)
    assert not watch.running
    assert verdicts.said.empty()
