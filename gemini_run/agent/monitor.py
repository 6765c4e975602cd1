"""Watches peer agents: one stream each, on a thread each. Says who is lost, and why, at once."""

from __future__ import annotations

import dataclasses
import http.client
import socket
import threading
import time
from collections.abc import Callable, Sequence

from gemini_run.agent.runtime import PeerNode
from gemini_run.agent.server import FINISHED, LEFT
from gemini_run.plan.health import Observation, patience, verdict
from gemini_run.wire import HTTP_WATCH

OnLost = Callable[[PeerNode, str], None]

_RETRY_SECONDS = 0.1


class Monitor:
    """Watches the peers of the present round.

    Args:
        on_lost: called with the peer and the cause, on the watching thread, at most once per peer and `watch`.
        clock: seconds, monotonic.
    """

    def __init__(self, on_lost: OnLost, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_lost = on_lost
        self._clock = clock
        self._watches: dict[PeerNode, _Watch] = {}

    def watch(self, peers: Sequence[PeerNode]) -> None:
        """Watch exactly these from now on. One that is watched already, and well, stays so."""
        for peer, watch in list(self._watches.items()):
            if peer not in peers or not watch.running:
                watch.stop()
                del self._watches[peer]
        for peer in peers:
            if peer not in self._watches:
                watch = self._watches[peer] = _Watch(peer, self._on_lost, self._clock)
                watch.start()

    def stop(self) -> None:
        self.watch(())


class _Watch:
    def __init__(self, peer: PeerNode, on_lost: OnLost, clock: Callable[[], float]) -> None:
        self._peer = peer
        self._on_lost = on_lost
        self._clock = clock
        self._stopped = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._main, name=f"gemini-watch-{peer.node_id}", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No verdict is given from now on. Does not wait for the thread."""
        self._stopped.set()
        if (sock := self._socket) is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread from its read
            except OSError:
                pass  # it ended by itself

    def _main(self) -> None:
        seen = Observation(last_heard=self._clock())
        while not self._stopped.is_set():
            seen = self._listen(seen)
            if seen is _ORDERLY:
                return
            cause = verdict(seen, self._clock())
            if cause is not None:
                if not self._stopped.is_set():
                    self._on_lost(self._peer, cause)
                return
            if self._clock() - seen.last_heard > _RETRY_SECONDS:
                self._stopped.wait(_RETRY_SECONDS)  # no route, no answer: ask again until silence decides

    def _listen(self, seen: Observation) -> Observation:
        """Connect and read until the stream ends or silence lasts too long."""
        connection = http.client.HTTPConnection(self._peer.host, self._peer.port)
        try:
            connection.timeout = max(0.05, patience(seen, self._clock()))
            connection.connect()
            sock = self._socket = connection.sock
            connection.request("GET", HTTP_WATCH, headers={"Authorization": f"Bearer {self._peer.token}"})
            response = connection.getresponse()
            if response.status != 200:  # another program has the port now
                return dataclasses.replace(seen, stream_ended=True)
            while not self._stopped.is_set():
                byte = response.read(1)
                if byte == FINISHED:
                    return _ORDERLY
                if byte == LEFT:
                    return dataclasses.replace(seen, left=True)
                if not byte:
                    return dataclasses.replace(seen, stream_ended=True)
                seen = Observation(last_heard=self._clock())
                sock.settimeout(patience(seen, self._clock()) + 0.05)
        except ConnectionRefusedError:
            return dataclasses.replace(seen, stream_ended=True, refused=True)
        except (OSError, http.client.HTTPException):
            return dataclasses.replace(seen, stream_ended=True)
        finally:
            self._socket = None
            connection.close()
        return seen


_ORDERLY = Observation(last_heard=0.0)  #: the job is over for everybody
