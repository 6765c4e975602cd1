"""Pull one slot from another node's agent into this node's memory, over HTTP range requests.

Recovery's transport: no worker runs yet, on either side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import queue
import threading
from pathlib import Path

from gemini_run.errors import GeminiError, PeerLost, ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, SlotHeader
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import Slot
from gemini_run.wire import HTTP_GENERATION, HTTP_SLOT

RANGE_BYTES = 16 * 2**20
CONNECTIONS = 4


@dataclasses.dataclass(frozen=True)
class Source:
    """A peer's agent.

    Attributes:
        timeout: seconds for connecting and for each read.
        generation: the round that the pull is of; a peer that has begun a newer one refuses it.
    """

    host: str
    port: int
    token: str = dataclasses.field(repr=False)
    timeout: float = 10.0
    generation: int | None = None


@dataclasses.dataclass(frozen=True)
class Pulled:
    """A slot that is now complete, sealed and verified here. `bytes`: what came over the network."""

    path: Path
    header: SlotHeader
    bytes: int


def pull_slot(
    memory: NodeMemory,
    owner: int,
    iteration: int,
    source: Source,
    *,
    range_bytes: int = RANGE_BYTES,
    connections: int = CONNECTIONS,
) -> Pulled:
    """Copy the slot (owner, iteration) of `source` into a free slot of `memory`.

    The slot is torn until every byte of it is here and every checksum holds. A range that fails is asked for once
    more, over a new connection.

    Raises:
        PeerLost: the peer does not answer, or has no such slot.
        ReplicaCorrupt: what came fails a checksum, or changed on the way; nothing of it is left here.
        MemoryFull: no room for the slot.
    """
    reader = RemoteSlot(source, owner, iteration)
    try:
        page = _fetch_header(reader)
        header = _expect(page, owner, iteration, source)
        slot = _open_slot(memory, owner, iteration, header.end)
        try:
            slot.begin()
            _fetch_body(source, slot, header, range_bytes, connections)
            if _fetch_header(reader) != page:
                raise ReplicaCorrupt(f"{source.host}:{source.port}: the slot of rank {owner} changed while it was read")
            slot.verify(header)
            slot.commit(header)  # last: until here the file counts as torn
        except BaseException:
            slot.path.unlink(missing_ok=True)
            raise
        finally:
            with contextlib.suppress(BufferError):  # a view lives on in a traceback: unmapped when that goes
                slot.close()
    finally:
        reader.close()
    return Pulled(slot.path, header, header.end)


def _expect(page: bytes, owner: int, iteration: int, source: Source) -> SlotHeader:
    header = SlotHeader.unpack(page)
    whole = header.complete and header.sealed and not header.borrowed
    if (header.owner, header.iteration) != (owner, iteration) or not whole:
        raise ReplicaCorrupt(
            f"{source.host}:{source.port} sent rank {header.owner}, iteration {header.iteration} (complete "
            f"{header.complete}, sealed {bool(header.sealed)}, borrowing {bool(header.borrowed)}) for rank {owner}, "
            f"iteration {iteration}"
        )
    return dataclasses.replace(header, flags=0)  # held for the durable tier there, not here


def _open_slot(memory: NodeMemory, owner: int, iteration: int, length: int) -> Slot:
    """A slot of `owner` to write into, locked: an old one that is large enough, else a new file."""
    path = memory.free_slot_path(owner, iteration)
    try:
        slot = Slot(path, writable=True)
    except (FileNotFoundError, ReplicaCorrupt):
        pass
    else:
        if slot.capacity >= length and slot.try_lock():
            return slot
        slot.close()
    slot = Slot.create(path, length)  # replaces the name; whoever still has the old file keeps it
    if not slot.try_lock():
        slot.close()
        raise PeerLost(f"{path}: somebody else writes this slot")
    return slot


def _fetch_header(reader: RemoteSlot) -> bytes:
    return reader.read(0, HEADER_BYTES)


def _fetch_body(source: Source, slot: Slot, header: SlotHeader, range_bytes: int, connections: int) -> None:
    """Everything behind the header page, `connections` ranges at a time, straight into the mapping."""
    todo: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for start in range(HEADER_BYTES, header.end, range_bytes):
        todo.put((start, min(start + range_bytes, header.end)))
    failures: list[Exception] = []

    def work() -> None:
        reader = RemoteSlot(source, header.owner, header.iteration)
        try:
            while not failures:
                start, end = todo.get_nowait()
                with slot.view[start:end] as view:
                    reader.fill(start, view)
        except queue.Empty:
            pass
        except Exception as error:  # noqa: BLE001 - the top of a thread: raised again by its starter
            failures.append(error)
        finally:
            reader.close()

    threads = [
        threading.Thread(target=work, name=f"gemini-pull-{n}", daemon=True)
        for n in range(min(connections, todo.qsize()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class _Refused(PeerLost):
    """The peer answered, and said no: asking again is useless."""


class RemoteSlot:
    """A slot file of a peer, over one connection, opened at the first read and again after `close`."""

    def __init__(self, source: Source, owner: int, iteration: int) -> None:
        self._source = source
        self._owner = owner
        self._iteration = iteration
        self._url = HTTP_SLOT.format(owner=owner, iteration=iteration)
        self._connection: http.client.HTTPConnection | None = None

    def header(self) -> SlotHeader:
        """Of the slot, which is whole and sealed. Raises: PeerLost, ReplicaCorrupt."""
        return _expect(self.read(0, HEADER_BYTES), self._owner, self._iteration, self._source)

    def read(self, start: int, length: int) -> bytes:
        """As `fill`, into new memory."""
        buffer = bytearray(length)
        self.fill(start, memoryview(buffer))
        return bytes(buffer)

    def fill(self, start: int, into: memoryview) -> None:
        """Fill `into` from the remote slot file at `start`; what fails is asked for once more, over a new connection.

        Raises: PeerLost, ReplicaCorrupt.
        """
        try:
            self._fill(start, into)
        except _Refused:
            raise
        except PeerLost:
            self.close()
            self._fill(start, into)

    def _fill(self, start: int, into: memoryview) -> None:
        source = self._source
        where = f"{source.host}:{source.port}{self._url}"
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                source.host, source.port, timeout=source.timeout, blocksize=2**20
            )
        headers = {
            "Authorization": f"Bearer {source.token}",
            "Range": f"bytes={start}-{start + len(into) - 1}",
            "Accept-Encoding": "identity",
        }
        if source.generation is not None:
            headers[HTTP_GENERATION] = str(source.generation)
        try:
            self._connection.request("GET", self._url, headers=headers)
            response = self._connection.getresponse()
            if response.status != 206:
                text = response.read(4096).decode(errors="replace").strip()
                raise _refusal(response.status, f"{where}: {response.status} {text or response.reason}")
            if response.length != len(into):
                raise ReplicaCorrupt(f"{where}: truncated: {response.length} of {len(into)} bytes at {start}")
            done = 0
            while done < len(into):
                count = response.readinto(into[done:])
                if not count:
                    raise PeerLost(f"{where}: the connection ended {len(into) - done} bytes early")
                done += count
            response.read()  # to the end of the answer, so that the connection can serve the next range
        except (OSError, http.client.HTTPException) as error:
            raise PeerLost(f"{where}: {error or type(error).__name__}") from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _refusal(status: int, message: str) -> GeminiError:
    if status in (410, 416):  # the peer found it corrupt, or it is shorter than its header says
        return ReplicaCorrupt(message)
    return PeerLost(message) if status == 503 else _Refused(message)
