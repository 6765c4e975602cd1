"""A small client of etcd v3 over its JSON gateway (``/v3/...``), which every etcd since 3.4 serves.

It is all that a rendezvous needs: read, compare-and-set, leases, and which members there are. One that cannot be
reached, or has no leader at the moment, is passed over for the next.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError

DEFAULT_PORT = 2379
REQUEST_SECONDS = 3.0  #: for one answer of one member
PATIENCE_SECONDS = 5.0  #: for any member to answer: an election takes one or two seconds
LEASE_SECONDS = 24 * 3600  #: how long what a run wrote stays in etcd after its last write
_LEASE_RENEWAL = 3600.0  #: writes take a new lease once theirs is so old
_PAUSE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A key's value, and the revision of etcd that wrote it (a fencing token)."""

    value: bytes
    revision: int


@dataclasses.dataclass(frozen=True)
class Member:
    """A member of the etcd cluster. `started`: it has once been running and said so."""

    id: int
    name: str
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]

    @property
    def started(self) -> bool:
        return bool(self.client_urls)


def parse_endpoints(text: str, default_port: int = DEFAULT_PORT, scheme: str = "http") -> list[str]:
    """ "h1:2379,h2,https://h3" as URLs. Raises: ValueError."""
    urls = []
    for part in (word.strip() for word in text.split(",")):
        if not part:
            continue
        url = part if "://" in part else f"{scheme}://{part}"
        head, _, rest = url.partition("://")
        host, colon, port = rest.rstrip("/").rpartition(":")
        if not colon or rest.endswith("]"):  # no port, or a bare IPv6 address in brackets
            host, port = rest.rstrip("/"), str(default_port)
        if head not in ("http", "https") or not host or not port.isdigit():
            raise ValueError(f"{part!r} is not HOST, HOST:PORT or a URL of such")
        urls.append(f"{head}://{host}:{port}")
    if not urls:
        raise ValueError("no host given")
    return urls


class EtcdClient:
    """Thread-safe. Methods raise RendezvousConnectionError once no member has answered for `patience` seconds."""

    def __init__(
        self, endpoints: Sequence[str], *, tls: ssl.SSLContext | None = None, patience: float = PATIENCE_SECONDS
    ) -> None:
        """
        Args:
            endpoints: URLs, in the order in which they are tried.
            tls: for https.
        """
        self.patience = patience
        self._endpoints = list(endpoints)
        self._lock = threading.Lock()
        self._lease: tuple[int, float] | None = None  # id, monotonic time of its grant
        # No proxy: the environment's is for the world outside the cluster.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls))
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._endpoints)

    # --- keys -----------------------------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        """The newest committed value."""
        return _entry(self._call("kv/range", {"key": _b64(key)}).get("kvs"))

    def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The values of `keys` at one moment."""
        if not keys:
            return []
        gets = [{"request_range": {"key": _b64(key)}} for key in keys]
        answer = self._call("kv/txn", {"success": gets})
        return [_entry(response["response_range"].get("kvs")) for response in answer["responses"]]

    def put(self, key: str, value: bytes) -> None:
        self._call("kv/put", {"key": _b64(key), "value": _b64(value), "lease": self._present_lease()})

    def compare_and_set(self, key: str, value: bytes, revision: int) -> tuple[Entry | None, bool]:
        """Write if `key` is still at `revision` (0: does not exist).

        Returns: the entry after that, and whether this call wrote it. A write whose answer got lost says False: the
            entry's value tells.
        """
        answer = self._call("kv/txn", {
            "compare": [{"key": _b64(key), "target": "MOD", "mod_revision": str(revision), "result": "EQUAL"}],
            "success": [{"request_put": {"key": _b64(key), "value": _b64(value), "lease": self._present_lease()}}],
            "failure": [{"request_range": {"key": _b64(key)}}],
        })  # fmt: skip
        if answer.get("succeeded"):
            return Entry(value, int(answer["header"]["revision"])), True
        return _entry(answer["responses"][0]["response_range"].get("kvs")), False

    def increment(self, key: str, amount: int) -> int:
        """Add to a decimal counter; returns the sum. Counted once, also where an answer got lost."""
        receipt = f"{key}#{secrets.token_hex(8)}"
        while True:
            entry = self.get(key)
            total = (int(entry.value) if entry else 0) + amount
            text, lease = _b64(str(total)), self._present_lease()
            puts = [{"request_put": {"key": _b64(k), "value": text, "lease": lease}} for k in (key, receipt)]
            revision = str(entry.revision if entry else 0)
            answer = self._call("kv/txn", {
                "compare": [{"key": _b64(key), "target": "MOD", "mod_revision": revision, "result": "EQUAL"}],
                "success": puts,
                "failure": [{"request_range": {"key": _b64(receipt)}}],
            })  # fmt: skip
            if answer.get("succeeded"):
                return total
            if (counted := _entry(answer["responses"][0]["response_range"].get("kvs"))) is not None:
                return int(counted.value)

    def delete_prefix(self, prefix: str) -> None:
        end = prefix.encode()
        end = end[:-1] + bytes([end[-1] + 1])
        self._call("kv/deleterange", {"key": _b64(prefix), "range_end": _b64(end)})

    # --- members --------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """Of the cluster, as the first member that answers knows them."""
        answer = self._call("cluster/member/list", {})
        return [
            Member(
                int(m["ID"]), m.get("name", ""), tuple(m.get("peerURLs", ())), tuple(m.get("clientURLs", ()))
            )
            for m in answer.get("members", ())
        ]  # fmt: skip

    def remove_member(self, number: int) -> None:
        self._call("cluster/member/remove", {"ID": str(number)})

    def add_member(self, peer_url: str) -> list[Member]:
        """Returns: all members, the new one with them."""
        self._call("cluster/member/add", {"peerURLs": [peer_url]})
        return self.members()

    # --- the wire -------------------------------------------------------------------------------------

    def _present_lease(self) -> str:
        with self._lock:
            lease = self._lease
        if lease is None or time.monotonic() - lease[1] > _LEASE_RENEWAL:
            lease = (int(self._call("lease/grant", {"TTL": str(LEASE_SECONDS)})["ID"]), time.monotonic())
            with self._lock:
                self._lease = lease
        return str(lease[0])

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        end = time.monotonic() + self.patience
        while True:
            problems = []
            for endpoint in self.endpoints:
                try:
                    return self._ask(endpoint, path, data)
                except (OSError, ValueError) as error:  # not there, no leader at present, or no etcd at all
                    problems.append(f"{endpoint}: {_said(error)}")
                    self._put_last(endpoint)
            if time.monotonic() > end:
                raise RendezvousConnectionError(f"no member of etcd answers: {'; '.join(problems)}")
            time.sleep(_PAUSE_SECONDS)

    def _ask(self, endpoint: str, path: str, data: bytes) -> dict[str, Any]:
        request = urllib.request.Request(f"{endpoint}/v3/{path}", data, {"Content-Type": "application/json"})
        with self._opener.open(request, timeout=REQUEST_SECONDS) as response:
            answer = json.load(response)
        if not isinstance(answer, dict):
            raise ValueError("not an answer of etcd")
        return answer

    def _put_last(self, endpoint: str) -> None:
        with self._lock:
            if endpoint in self._endpoints:
                self._endpoints.remove(endpoint)
                self._endpoints.append(endpoint)


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        try:
            return str(json.loads(error.read())["error"])
        except (ValueError, KeyError, TypeError, OSError):
            return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _entry(kvs: Sequence[dict[str, str]] | None) -> Entry | None:
    if not kvs:
        return None
    return Entry(base64.b64decode(kvs[0].get("value", "")), int(kvs[0]["mod_revision"]))


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
