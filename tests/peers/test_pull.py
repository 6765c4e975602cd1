"""Pulling slots: from a real agent's server, and from one that misbehaves."""

from __future__ import annotations

import http.server
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemini_run.agent.server import AgentServer
from gemini_run.errors import PeerLost, ReplicaCorrupt
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import Slot
from gemini_run.peers.pull import Source, pull_slot
from gemini_run.testing.slotfiles import write_slot

TENSORS = {"a": os.urandom(70_001), "b": b"", "c": os.urandom(33)}
OWNER, ITERATION = 3, 12


@pytest.fixture
def here(tmp_path: Path) -> Iterator[NodeMemory]:
    memory = NodeMemory.claim("here", tmp_path)
    yield memory
    memory.release(remove=True)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[NodeMemory]:
    memory = NodeMemory.claim("there", tmp_path)
    write_slot(
        memory.paths.slot(OWNER, 1), iteration=ITERATION, owner=OWNER, world_size=8, round=2, tensors=TENSORS,
        objects=b'{"step": 12}', hold=True,
    )  # fmt: skip
    yield memory
    memory.release(remove=True)


@pytest.fixture
def source(there: NodeMemory) -> Iterator[Source]:
    server = AgentServer(there, "there")
    server.start()
    yield Source("127.0.0.1", server.port, server.own_token)
    server.stop()


def payload_of(path: Path) -> dict[str, bytes]:
    slot = Slot(path)
    try:
        header, manifest = slot.verify()
        with slot.payload(header) as payload:
            return {item.name: bytes(payload[item.offset : item.offset + item.length]) for item in manifest.items}
    finally:
        slot.close()


def nothing_usable(memory: NodeMemory) -> bool:
    return not any(info.usable for info in memory.scan())


@pytest.mark.parametrize("range_bytes", [1000, 4096, 10**7])
def test_a_pulled_slot_equals_its_source(here: NodeMemory, there: NodeMemory, source: Source, range_bytes: int) -> None:
    pulled = pull_slot(here, OWNER, ITERATION, source, range_bytes=range_bytes)
    assert payload_of(pulled.path) == TENSORS
    found = here.find(OWNER, ITERATION)
    assert found is not None and found.header is not None
    header = found.header
    assert (header.round, header.world_size, header.complete, bool(header.sealed)) == (2, 8, True, True)
    assert not header.hold  # the durable tier waits for the copy there, not for this one
    original = there.find(OWNER, ITERATION)
    assert original is not None and original.header is not None and original.header.hold
    assert pulled.bytes == header.end


def test_an_unsealed_slot_arrives_sealed(here: NodeMemory, there: NodeMemory, source: Source) -> None:
    write_slot(there.paths.slot(0, 0), iteration=4, tensors={"w": b"x" * 50}, seal=False)
    assert pull_slot(here, 0, 4, source).header.sealed


def test_an_old_slot_is_used_again_and_other_owners_are_left_alone(here: NodeMemory, source: Source) -> None:
    old = here.paths.slot(OWNER, 0)
    write_slot(old, iteration=1, owner=OWNER, world_size=8, tensors={"a": b"x" * 200_000})
    write_slot(here.paths.slot(OWNER, 1), iteration=2, owner=OWNER, world_size=8, tensors={"a": b"x" * 200_000})
    other = here.paths.slot(0, 0)
    write_slot(other, iteration=ITERATION, tensors={"a": b"y"})
    before = (old.stat().st_ino, other.read_bytes())
    assert pull_slot(here, OWNER, ITERATION, source).path == old
    assert (old.stat().st_ino, other.read_bytes()) == before


def test_a_corrupt_source_leaves_nothing_here(here: NodeMemory, there: NodeMemory, source: Source) -> None:
    path = there.paths.slot(OWNER, 1)
    slot = Slot(path, writable=True)
    at = slot.header().payload_offset + 70_000
    slot.view[at] = slot.view[at] ^ 1
    slot.close()
    with pytest.raises(ReplicaCorrupt, match="tensor 'a' fails its checksum"):
        pull_slot(here, OWNER, ITERATION, source)
    assert list(here.paths.slots.iterdir()) == []


def test_a_slot_that_is_not_there(here: NodeMemory, source: Source) -> None:
    with pytest.raises(PeerLost, match="404"):
        pull_slot(here, OWNER, ITERATION + 1, source)
    assert nothing_usable(here)


def test_a_wrong_token(here: NodeMemory, source: Source) -> None:
    with pytest.raises(PeerLost, match="401"):
        pull_slot(here, OWNER, ITERATION, Source(source.host, source.port, "wrong"))


def test_nobody_there(here: NodeMemory, there: NodeMemory) -> None:
    server = AgentServer(there, "there")
    port = server.port
    server.stop()
    with pytest.raises(PeerLost, match="refused"):
        pull_slot(here, OWNER, ITERATION, Source("127.0.0.1", port, "t"))


# --- a peer that misbehaves --------------------------------------------------------------------------------

Behave = Callable[[int, int, bytes], bytes]  #: (number of the request, start of the range, right answer) -> sent


class FaultyPeer:
    """Serves one slot file; `behave` may shorten or change each answer. Short ones end the connection."""

    def __init__(self, data: bytes, behave: Behave) -> None:
        peer = self
        self.requests: list[int] = []
        self._lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
                assert match is not None
                start, end = int(match[1]), int(match[2]) + 1
                with peer._lock:
                    number = len(peer.requests)
                    peer.requests.append(start)
                right = data[start:end]
                sent = behave(number, start, right)
                self.send_response(206)
                self.send_header("Content-Length", str(len(right)))
                self.end_headers()
                self.wfile.write(sent)
                self.close_connection = len(sent) != len(right)

            def log_message(self, format: str, *args: object) -> None:
                pass  # the test says what went wrong

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.source = Source("127.0.0.1", self._server.server_address[1], "t")
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def faulty(there: NodeMemory) -> Iterator[Callable[[Behave], FaultyPeer]]:
    peers: list[FaultyPeer] = []

    def make(behave: Behave) -> FaultyPeer:
        peers.append(FaultyPeer(there.paths.slot(OWNER, 1).read_bytes(), behave))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def test_a_range_that_breaks_off_is_asked_for_once_more(
    here: NodeMemory, faulty: Callable[[Behave], FaultyPeer]
) -> None:
    broken: set[int] = set()

    def first_time_short(number: int, start: int, right: bytes) -> bytes:
        if start in broken:
            return right
        broken.add(start)
        return right[: len(right) // 2]

    peer = faulty(first_time_short)
    pulled = pull_slot(here, OWNER, ITERATION, peer.source, range_bytes=20_000)
    assert payload_of(pulled.path) == TENSORS
    assert {start: peer.requests.count(start) for start in broken if start} == {start: 2 for start in broken if start}


def test_a_peer_that_breaks_off_twice_is_lost_and_leaves_nothing_complete(
    here: NodeMemory, faulty: Callable[[Behave], FaultyPeer]
) -> None:
    peer = faulty(lambda number, start, right: right if start == 0 else right[:-1])
    with pytest.raises(PeerLost, match="ended 1 bytes early"):
        pull_slot(here, OWNER, ITERATION, peer.source, connections=1)
    assert nothing_usable(here)


def test_bytes_that_change_on_the_way_are_refused(here: NodeMemory, faulty: Callable[[Behave], FaultyPeer]) -> None:
    peer = faulty(lambda number, start, right: right if start == 0 else right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(ReplicaCorrupt, match="checksum"):
        pull_slot(here, OWNER, ITERATION, peer.source, range_bytes=1000)
    assert nothing_usable(here)


def test_a_slot_written_anew_while_it_is_read_is_refused(
    here: NodeMemory, there: NodeMemory, faulty: Callable[[Behave], FaultyPeer]
) -> None:
    anew = write_slot(
        there.paths.slot(OWNER, 0), iteration=ITERATION, owner=OWNER, world_size=8, round=3, tensors=TENSORS
    )
    page = anew.pack()
    peer = faulty(lambda number, start, right: page + right[len(page) :] if number and start == 0 else right)
    with pytest.raises(ReplicaCorrupt, match="changed while it was read"):
        pull_slot(here, OWNER, ITERATION, peer.source)
    assert nothing_usable(here)


def test_a_pull_that_dies_midway_leaves_a_torn_slot(here: NodeMemory, faulty: Callable[[Behave], FaultyPeer]) -> None:
    seen: list[list[str | None]] = []

    def look(number: int, start: int, right: bytes) -> bytes:
        seen.append([info.problem for info in here.scan()])
        return right

    for index in range(2):
        path = here.paths.slot(OWNER, index)
        write_slot(path, iteration=1 + index, owner=OWNER, world_size=8, tensors={"a": b"x" * 200_000})
    pull_slot(here, OWNER, ITERATION, faulty(look).source, range_bytes=20_000)
    during = seen[1:]  # the first request reads the header, before anything is touched
    assert seen[0] == [None, None]
    assert len(during) > 2
    assert all(problems[0] is not None and problems[1] is None for problems in during), "the newer one stays"
