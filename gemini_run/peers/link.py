"""What this node's network carries: the kernel's byte counters of the interface that replicas take.

That is how the training's own traffic is timed. It sees the collectives of any backend and library as they load the
link, needs no hook on the user's groups, and leaves out what never leaves the node. Traffic of RDMA devices (NCCL over
InfiniBand, RoCE or EFA) goes past the interface's counters: the devices have counters of their own.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

_SIOCGIFADDR = 0x8915
_INFINIBAND = Path("/sys/class/infiniband")
#: of this process's network namespace; /sys/class/net is that of whoever mounted /sys
_INTERFACES = Path("/proc/self/net/dev")
_INTERFACES_V6 = Path("/proc/self/net/if_inet6")
_RECEIVED, _SENT = 0, 8  #: columns of _INTERFACES
#: file of an RDMA port -> bytes per count: InfiniBand counts words of four bytes, EFA bytes
_RDMA_COUNTERS = {
    "counters/port_xmit_data": 4, "counters/port_rcv_data": 4, "hw_counters/tx_bytes": 1, "hw_counters/rx_bytes": 1,
}  # fmt: skip


def interface_of(address: str) -> str | None:
    """Name of the interface that has `address` (IPv4 or IPv6), None if there is none."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = _INTERFACES_V6.read_text(encoding="ascii").splitlines() if _INTERFACES_V6.exists() else []
        return next((words[5] for words in map(str.split, lines) if words[0] == wanted), None)
    packed = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if answer[20:24] == packed:
                return name
    return "lo" if packed[0] == 127 else None


class LinkCounter:
    """Bytes that a network interface has carried so far, and the RDMA devices that share its wire."""

    def __init__(self, interface: str, infiniband: Path = _INFINIBAND) -> None:
        """Raises: OSError if the kernel has no counters of it."""
        self._prefix = f"{interface}:".encode()
        self._interfaces = os.open(_INTERFACES, os.O_RDONLY | os.O_CLOEXEC)
        self._rdma: list[tuple[int, int]] = []  # descriptor, bytes per count
        try:
            for port in sorted(infiniband.glob("*/ports/*")):
                # Of the same adapter; or of one without an interface (EFA), which is beside ours on the same card.
                own = port.parent.parent / "device" / "net"
                if not own.exists() or (own / interface).exists():
                    self._open_rdma(port)
            self.read()
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(f"no byte counters of the interface {interface!r}: {error}") from error

    def _open_rdma(self, port: Path) -> None:
        for name, unit in _RDMA_COUNTERS.items():
            if (port / name).exists():
                self._rdma.append((os.open(port / name, os.O_RDONLY | os.O_CLOEXEC), unit))

    def read(self) -> int:
        """Sent and received, together. Raises: OSError, ValueError."""
        table = b""
        while part := os.pread(self._interfaces, 1 << 16, len(table)):  # the kernel gives a page at a time
            table += part
        for line in table.splitlines():
            if line.lstrip().startswith(self._prefix):
                columns = line.partition(b":")[2].split()
                carried = int(columns[_RECEIVED]) + int(columns[_SENT])
                return carried + sum(unit * int(os.pread(descriptor, 32, 0)) for descriptor, unit in self._rdma)
        raise ValueError("it is not among this network namespace's")

    def close(self) -> None:
        """Idempotent."""
        while self._rdma:
            os.close(self._rdma.pop()[0])
        if self._interfaces >= 0:
            os.close(self._interfaces)
            self._interfaces = -1


class Sampler:
    """A thread that reads a counter at a steady pace, between `start` and `stop`."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._stopped = threading.Event()
        self._samples: list[tuple[float, int]] = []

    def start(self, period: float) -> None:
        """Args: period: seconds."""
        self.stop()
        self._stopped, self._samples = threading.Event(), []
        arguments = (self._stopped, self._samples, period)
        threading.Thread(target=self._main, args=arguments, name="gemini-link", daemon=True).start()

    def stop(self) -> list[tuple[float, int]]:
        """(time.perf_counter(), bytes) since `start`. The thread ends by itself, within a period."""
        self._stopped.set()
        samples, self._samples = self._samples, []
        return samples

    def _main(self, stopped: threading.Event, samples: list[tuple[float, int]], period: float) -> None:
        while not stopped.wait(period):
            try:
                samples.append((time.perf_counter(), self._read()))
            except (OSError, ValueError):
                return  # the interface is gone: too few samples make no profile
