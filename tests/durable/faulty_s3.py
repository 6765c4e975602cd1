"""An S3 server on loopback that fails when told to: moto's application behind a fault script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"

_NO_SUCH_UPLOAD = b"<?xml version='1.0'?><Error><Code>NoSuchUpload</Code><Message>Forgotten.</Message></Error>"


class FaultyS3:
    """Attributes:
    requests: (method, path with query) of everything that arrived.
    faults: decide per request: None = serve it, "slow" = 503 SlowDown, "stop" = the server goes
        away, "gone" = 404 NoSuchUpload.
    fired: faults that happened, in order.
    """

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server: Any = None
        self.port = 0
        self.requests: list[tuple[str, str]] = []
        self.fired: list[str] = []
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.stopped = threading.Event()

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self.port, self._serve, threaded=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
        self.requests.append((environ["REQUEST_METHOD"], path))
        fault = self.fault(environ["REQUEST_METHOD"], path)
        if fault is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            self.fired.append(fault)
            if fault == "stop":
                # From another thread: shutdown() waits for the loop that this request hangs on.
                threading.Thread(target=self._go_away, daemon=True).start()
            if fault == "gone":
                start_response("404 Not Found", [("Content-Type", "application/xml")])
                return [_NO_SUCH_UPLOAD]
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [_SLOW_DOWN]
        return self._app(environ, start_response)

    def _go_away(self) -> None:
        self.stop()
        self.stopped.set()
