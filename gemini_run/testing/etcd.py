"""A real etcd on loopback: members that can be killed and started again."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from gemini_run.agent.etcd import EtcdClient
from gemini_run.agent.etcd_member import find_program
from gemini_run.testing.processes import free_port, wait_for

_STARTING_SECONDS = 60.0
_LOOK_SECONDS = 0.5


class EtcdCluster:
    """A context manager; nothing it started or made outlives it.

    Attributes:
        ports: of the members, for clients.
    """

    def __init__(self, members: int = 3) -> None:
        self.ports = [free_port() for _ in range(members)]
        self._peer_ports = [free_port() for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoint(self) -> str:
        """As ``--rdzv-endpoint`` takes it."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def __enter__(self) -> EtcdCluster:
        self._directory = Path(tempfile.mkdtemp(prefix="gemini-run-etcd-"))
        try:
            for index in range(len(self.ports)):
                self.start(index)
            self.wait_until_it_serves()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def start(self, index: int) -> None:
        """Start a member (again, on its data)."""
        peers = [f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peer_ports)]
        mine = f"http://127.0.0.1:{self._peer_ports[index]}"
        with (self._directory / f"m{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(
                [
                    find_program(),
                    f"--name=m{index}",
                    f"--data-dir={self._directory / f'm{index}'}",
                    f"--listen-client-urls={self.urls[index]}",
                    f"--advertise-client-urls={self.urls[index]}",
                    f"--listen-peer-urls={mine}",
                    f"--initial-advertise-peer-urls={mine}",
                    f"--initial-cluster={','.join(peers)}",
                    "--logger=zap",
                    "--log-level=error",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, index: int) -> None:
        """SIGKILL a member."""
        process = self._processes.pop(index)
        process.kill()
        process.wait()

    def wait_until_it_serves(self) -> None:
        """Block until a majority serves. Raises: WaitTimeout."""
        client = EtcdClient(self.urls, patience=_LOOK_SECONDS)

        def serves() -> bool:
            try:
                client.get("/")
            except RendezvousConnectionError:
                return False
            return True

        wait_for(serves, _STARTING_SECONDS, "etcd to serve", context=self._said)

    def _said(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self._directory.glob("*.log")))

    def _close(self) -> None:
        for index in list(self._processes):
            self.kill(index)
        shutil.rmtree(self._directory, ignore_errors=True)
