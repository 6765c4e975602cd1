"""``--rdzv-backend etcd-v3``: torch's rendezvous over a cluster of etcd, so that no single node's death ends a job.

torch's own ``etcd`` and ``etcd-v2`` speak a protocol that no present etcd has. Everything else of torch's handler
stays; it gets this backend for its state and this store for what its members exchange.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from gemini_run.agent.etcd import EtcdClient, parse_endpoints
from gemini_run.errors import ConfigError

BACKEND = "etcd-v3"
PREFIX = "/gemini-run/"
_POLL_SECONDS = 0.01
_STORE_TIMEOUT = timedelta(seconds=60)


def register() -> None:
    """Make the backend known to torch's launcher. May be called again."""
    rendezvous_handler_registry.register(BACKEND, create)


def create(params: RendezvousParameters) -> RendezvousHandler:
    """torch's handler for ``--rdzv-endpoint h1:2379,h2:2379,...``.

    ``--rdzv-conf`` knows, beside torch's own keys: ``protocol`` (http, https), ``cacert``, ``cert`` and ``key``
    (files of TLS).

    Raises:
        ConfigError: an endpoint or a file is wrong, or no member answers.
    """
    try:
        endpoints = parse_endpoints(params.endpoint, scheme=params.get("protocol", "http"))
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint {params.endpoint}: {error}") from error
    client = EtcdClient(endpoints, tls=_tls(params) if any(url.startswith("https") for url in endpoints) else None)
    try:
        client.get(PREFIX)
    except RendezvousConnectionError as error:
        raise ConfigError(f"--rdzv-endpoint {params.endpoint}: {error}") from error
    return handler_over(client, BACKEND, params)


def handler_over(client: EtcdClient, name: str, params: RendezvousParameters) -> RendezvousHandler:
    """torch's handler with all that it shares in the etcd of `client`."""
    prefix = f"{PREFIX}{params.run_id}/"
    return create_handler(EtcdStore(client, f"{prefix}store/"), EtcdBackend(client, name, f"{prefix}state"), params)


def _tls(params: RendezvousParameters) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=params.get("cacert"))
        if params.get("cert"):
            context.load_cert_chain(params.get("cert"), params.get("key"))
        return context
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--rdzv-conf cacert/cert/key: {error}") from error


class EtcdBackend(RendezvousBackend):
    """The rendezvous state under one key; its fencing token is the revision of etcd that wrote it."""

    def __init__(self, client: EtcdClient, name: str, key: str) -> None:
        self.client = client
        self._name = name
        self._key = key

    @property
    def name(self) -> str:
        return self._name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Raises: RendezvousConnectionError."""
        entry = self.client.get(self._key)
        return (entry.value, entry.revision) if entry else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Raises: RendezvousConnectionError."""
        entry, written = self.client.compare_and_set(self._key, state, token if isinstance(token, int) else 0)
        if entry is None:
            return None
        # A write whose answer got lost shows by its value. Equal states of two nodes are one state.
        return entry.value, entry.revision, written or entry.value == state


class EtcdStore(dist.Store):
    """A store of torch.distributed in etcd, for the few small values that agents exchange; not for workers.

    What it raises when etcd cannot be reached is RendezvousConnectionError. torch's PrefixStore holds no reference
    to it: whoever makes one over it keeps this object.
    """

    def __init__(self, client: EtcdClient, prefix: str, timeout: timedelta = _STORE_TIMEOUT) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._timeout = timeout

    @property
    def host(self) -> str:
        """A host towards which this node's address is to be chosen."""
        return self._client.endpoints[0].partition("://")[2].rpartition(":")[0].strip("[]")

    def set(self, key: str, value: Any) -> None:
        self._client.put(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        entry = self._client.get(self._prefix + key)
        if entry is None:
            raise RendezvousConnectionError(f"key {key!r} was deleted")
        return entry.value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [entry.value for entry in self._client.get_many(self._full(keys)) if entry is not None]

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._client.get_many(self._full(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._timeout
        end = time.monotonic() + limit.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(keys)}")
            time.sleep(_POLL_SECONDS)

    def add(self, key: str, amount: int) -> int:
        return self._client.increment(self._prefix + key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        wanted, new = _bytes(expected), _bytes(desired)
        while True:
            entry = self._client.get(self._prefix + key)
            if entry is None and wanted:
                return wanted  # what TCPStore says of a key that is not there
            if entry is not None and entry.value != wanted:
                return entry.value
            now, written = self._client.compare_and_set(self._prefix + key, new, entry.revision if entry else 0)
            if written or (now is not None and now.value == new):
                return new

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        return False

    def _full(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
