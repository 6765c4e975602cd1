"""Mount and network namespaces for nodes: an own /dev/shm, an own network behind a bridge. Needs root."""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import shutil
import subprocess
from pathlib import Path

INTERFACE = "eth0"  #: of each node of a Network
_NETWORK = "10.213.77"  # seen only inside the namespaces made here


@functools.cache
def require_root_namespaces(*, network: bool = False) -> str | None:
    """Why this machine cannot make the namespaces, in a form for ``pytest.skip``; None where it can.

    Args:
        network: also network namespaces, a bridge and veth pairs (program ``ip``).
    """
    if os.getuid() != 0:
        return "needs root (mount and network namespaces)"
    for program in ("unshare", "nsenter", "mount", *(("ip", "tc") if network else ())):
        if shutil.which(program) is None:
            package = "iproute2" if program in ("ip", "tc") else "util-linux"
            return f"needs the program {program} (Debian package {package})"
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /dev/shm"]
    trial = subprocess.run(probe, capture_output=True, text=True, check=False)
    if trial.returncode:
        return f"mount namespaces are not allowed here: {trial.stderr.strip()}"
    if network:
        try:
            Network().close()
        except subprocess.CalledProcessError as error:
            return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


class SharedMemory:
    """A tmpfs that takes the place of /dev/shm in the node's mount namespace.

    It is mounted outside too, at `directory`, so that the harness can look into it and it outlives the node's
    processes until `lose`.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        """Raises: subprocess.CalledProcessError if it cannot be mounted."""
        self.directory = directory
        self.size_bytes = size_bytes
        self._mounted = False
        self._mount()

    def command(self, command: list[str]) -> list[str]:
        """`command`, to be run with this memory as its /dev/shm; the process id stays the same."""
        script = f'mount --bind {shlex.quote(str(self.directory))} /dev/shm && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh", *command]

    def lose(self) -> None:
        """Everything in it is gone; what starts next finds a new, empty one."""
        self.close()
        self._mount()

    def close(self) -> None:
        """Idempotent."""
        if not self._mounted:
            return
        # Emptied first: namespaces made later hold a copy of the mount, and would keep its memory.
        for entry in self.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        _run("umount", "--lazy", str(self.directory))
        self.directory.rmdir()
        self._mounted = False

    def _mount(self) -> None:
        self.directory.mkdir(parents=True)
        options = f"size={self.size_bytes},mode=1777"
        _run("mount", "-t", "tmpfs", "-o", options, "gemini-run-testing", str(self.directory))
        self._mounted = True


class Network:
    """A bridge in a namespace of its own, and one namespace per node that is joined to it."""

    def __init__(self, rate: str | None = None) -> None:
        """
        Args:
            rate: of every node's link, each way, as `tc` writes it ("200mbit"); None = as fast as it goes.
        """
        self._tag = secrets.token_hex(3)
        self._rate = rate
        self._hub = f"gr{self._tag}hub"
        self._namespaces: list[str] = []
        self._add(self._hub)
        try:
            _ip(self._hub, "link", "add", "bridge", "type", "bridge")
            _ip(self._hub, "link", "set", "bridge", "up")
        except BaseException:
            self.close()
            raise

    def join(self, index: int) -> None:
        """Make node `index`'s namespace and plug it in. Its address is `address(index)`."""
        name = self._node(index)
        self._add(name)
        port = self._port(index)
        _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port,
             "netns", self._hub)  # fmt: skip
        _ip(self._hub, "link", "set", port, "master", "bridge", "up")
        _ip(name, "link", "set", "lo", "up")
        _ip(name, "address", "add", f"{self.address(index)}/24", "dev", INTERFACE)
        _ip(name, "link", "set", INTERFACE, "up")
        if self._rate:
            for namespace, device in ((name, INTERFACE), (self._hub, port)):
                _run("tc", "-netns", namespace, "qdisc", "add", "dev", device, "root", "tbf",
                     "rate", self._rate, "burst", "256kb", "latency", "100ms")  # fmt: skip

    def address(self, index: int) -> str:
        return f"{_NETWORK}.{index + 1}"

    def command(self, index: int, command: list[str]) -> list[str]:
        """`command`, to be run in node `index`'s network; the process id stays the same."""
        return ["nsenter", f"--net=/run/netns/{self._node(index)}", *command]

    def cut(self, index: int) -> None:
        """The cable of node `index` is out: packets vanish, nobody is told."""
        _ip(self._hub, "link", "set", self._port(index), "nomaster")

    def restore(self, index: int) -> None:
        _ip(self._hub, "link", "set", self._port(index), "master", "bridge")

    def close(self) -> None:
        """Remove every namespace made here, and the links with them. Idempotent."""
        while self._namespaces:
            _run("ip", "netns", "delete", self._namespaces[-1])
            self._namespaces.pop()

    def _add(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)

    def _node(self, index: int) -> str:
        return f"gr{self._tag}n{index}"

    def _port(self, index: int) -> str:
        return f"port{index}"


def _ip(namespace: str, *arguments: str) -> None:
    _run("ip", "-netns", namespace, *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
