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
from gemini_run.plan.health import STALL_SECONDS, Observation, awake_since, patience, verdict
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
        self._pulse = _Pulse(clock)
        self._watches: dict[PeerNode, _Watch] = {}

    def watch(self, peers: Sequence[PeerNode]) -> None:
        """Watch exactly these from now on. One that is watched already, and well, stays so."""
        self._pulse.keep(bool(peers))
        for peer, watch in list(self._watches.items()):
            if peer not in peers or not watch.running:
                watch.stop()
                del self._watches[peer]
        for peer in peers:
            if peer not in self._watches:
                watch = self._watches[peer] = _Watch(peer, self._on_lost, self._clock, self._pulse)
                watch.start()

    def stop(self) -> None:
        self.watch(())


class _Pulse:
    """Knows since when this process has been running without a break (SIGSTOP, a stalled machine)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._awake = self._tick = clock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, running: bool) -> None:
        """Run from now on, or no longer."""
        if running and self._thread is None:
            self._stopped.clear()
            self._awake = self._tick = self._clock()
            self._thread = threading.Thread(target=self._main, name="gemini-pulse", daemon=True)
            self._thread.start()
        elif not running and self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def awake_since(self) -> float:
        with self._lock:
            now = self._clock()
            self._awake, self._tick = awake_since(self._awake, self._tick, now), now
            return self._awake

    def _main(self) -> None:
        while not self._stopped.wait(STALL_SECONDS / 4):
            self.awake_since()


class _Watch:
    def __init__(self, peer: PeerNode, on_lost: OnLost, clock: Callable[[], float], pulse: _Pulse) -> None:
        self._peer = peer
        self._on_lost = on_lost
        self._clock = clock
        self._pulse = pulse
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
            # Not heard while this process itself was stopped: it gets the whole time once more.
            seen = dataclasses.replace(seen, last_heard=max(seen.last_heard, self._pulse.awake_since()))
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
