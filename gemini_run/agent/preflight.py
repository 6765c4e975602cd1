"""What can be found wrong before anything starts, said in one line."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import socket
import threading
from collections.abc import Collection
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from gemini_run.agent import etcd_member
from gemini_run.config import Settings
from gemini_run.durable.tier import open_tier
from gemini_run.errors import ConfigError
from gemini_run.memory.segment import ended_runs
from gemini_run.terminal import say
from gemini_run.wire import run_memory

_C10D_DEFAULT_PORT = 29400
_PROBE_SECONDS = 5
_SHOWN = 3  #: paths in a line


def check_script(args: argparse.Namespace, subcommands: Collection[str] = ()) -> None:
    """Raises: ConfigError where the program to run is not there: every restart would only find that again.

    Args:
        subcommands: of gemini-run, one of which a script that is missing may have been meant to be.
    """
    script = args.training_script
    if args.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"{script}: no such program on PATH")
    elif not args.module and not os.path.exists(script):
        meant = difflib.get_close_matches(script, subcommands, n=1)
        hint = f"; did you mean gemini-run {meant[0]}?" if meant else ""
        raise ConfigError(
            f"{script}: no such file in {os.getcwd()}{hint}"
            if not os.path.isabs(script)
            else f"{script}: no such file{hint}"
        )


def check_memory(settings: Settings, run_id: str) -> None:
    """Says what earlier runs still hold of it.

    Raises: ConfigError where the folder for host memory is missing or cannot be written.
    """
    folder = settings.memory_dir
    if not folder.is_dir():
        raise ConfigError(f"--memory-dir {folder}: no such directory; give a tmpfs such as /dev/shm")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--memory-dir {folder}: not writable by user id {os.getuid()}")
    left = [(path, size) for path, size in ended_runs(folder) if path != run_memory(run_id, folder) and size]
    if left:
        runs = ", ".join(str(path) for path, _ in left[:_SHOWN]) + (" ..." if len(left) > _SHOWN else "")
        say(
            f"{sum(size for _, size in left) / 2**20:.0f} MiB of host memory are held by {len(left)} run(s) that ended "
            f"without success ({runs}): gemini-run recover exports what is there, removing the directory frees it"
        )


def check_durable(settings: Settings) -> None:
    """Write, read and delete a probe in the durable tier. Raises: ConfigError, DurableError."""
    if settings.durable is not None:
        open_tier(settings.durable).preflight()


def check_port(args: argparse.Namespace) -> None:
    """Raises: ConfigError where the port of the rendezvous is to be opened here and another program holds it."""
    if args.rdzv_backend == "static":
        if args.node_rank == 0:
            _check_static(args)
    elif args.rdzv_backend == "c10d" and "store_type=file" not in args.rdzv_conf.replace(" ", ""):
        _check_c10d(args.rdzv_endpoint)
    elif args.rdzv_backend == etcd_member.BACKEND:
        members = etcd_member.places(args.rdzv_endpoint)
        if (warning := etcd_member.few_members_warning(members)) is not None:
            say(f"warning: {warning}")


def _check_static(args: argparse.Namespace) -> None:
    if args.rdzv_endpoint:
        flag = "--rdzv-endpoint"
        port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=0)[1]
    else:
        flag = "--master-port"
        port = 29500 if args.master_port is None else args.master_port
    if not _port_free(port):
        raise ConfigError(
            f"{flag}: port {port} on this host is held by another program; give another port, or none "
            "(one node then takes a free one)"
        )


def _check_c10d(endpoint: str) -> None:
    host, port = parse_rendezvous_endpoint(endpoint, default_port=_C10D_DEFAULT_PORT)
    if port == 0 or not _matches_machine_hostname(host) or _port_free(port):
        return
    # Held: by an agent of this job that was first on this host, or by a stranger.
    if not _is_store(host, port):
        raise ConfigError(
            f"--rdzv-endpoint {endpoint}: port {port} on this host is held by a program that is not a "
            "rendezvous store; give another port"
        )


def _is_store(host: str, port: int) -> bool:
    """Whether a TCPStore answers there in time. In a thread: against a silent stranger its constructor never ends."""
    answered = threading.Event()

    def ask() -> None:
        limit = timedelta(seconds=_PROBE_SECONDS)
        try:
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:  # torch.distributed's errors derive from it
            return
        answered.set()

    threading.Thread(target=ask, name="gemini-probe", daemon=True).start()
    return answered.wait(_PROBE_SECONDS)


def _port_free(port: int) -> bool:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
