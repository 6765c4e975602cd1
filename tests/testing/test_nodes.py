"""The node helpers themselves: what they start ends, what they lose is gone, what they cut is silent."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from gemini_run.agent.process import is_running
from gemini_run.memory.beacons import Beacon, BeaconState
from gemini_run.memory.segment import NodeMemory
from gemini_run.testing.namespaces import SharedMemory
from gemini_run.testing.nodes import (
    LocalCluster,
    WaitTimeout,
    free_port,
    require_root_namespaces,
    wait_for,
)
from gemini_run.testing.processes import MARKER, marked_processes
from gemini_run.wire import DEFAULT_MEMORY_BASE, ENV_RUN_HOME, run_memory

needs_namespaces = pytest.mark.skipif(require_root_namespaces() is not None, reason=require_root_namespaces() or "")
needs_networks = pytest.mark.skipif(
    require_root_namespaces(network=True) is not None, reason=require_root_namespaces(network=True) or ""
)

SH = ["sh", "-c"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_wait_for_returns_the_value_and_says_what_never_came() -> None:
    answers = iter([None, None, 7])
    assert wait_for(lambda: next(answers), 5, "a value") == 7
    with pytest.raises(WaitTimeout, match=r"waiting for the moon\nof cheese"):
        wait_for(lambda: False, 0, "the moon", context=lambda: "of cheese")


def test_free_port_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_a_node_runs_its_program_in_its_own_run_home() -> None:
    with LocalCluster(nodes=1) as cluster:
        node = cluster.nodes[0]
        node.start([f'echo "$1 ${ENV_RUN_HOME}"; exit 3', "sh", "hello"], program=SH)
        assert node.wait(10) == 3
        assert node.output() == f"hello {cluster.home}\n"
        assert "exit code 3" in node.tail() and "hello" in node.tail()


def test_kill_ends_daemons_that_left_the_tree_and_the_session_and_empties_the_memory() -> None:
    with LocalCluster(nodes=1) as cluster:
        node = cluster.nodes[0]
        # A daemon (double fork, own session), and a child whose environment has been wiped.
        script = "(setsid sleep 600 &); env -i sleep 600 & touch ready; sleep 600"
        node.start([f"cd {cluster.scratch}; {script}"], program=SH)
        cluster.wait_for((cluster.scratch / "ready").exists, 10, "the script")
        pids = cluster.wait_for(lambda: p if len(p := node.processes()) == 4 else None, 10, "four processes")
        (node.memory_base / "slot").write_text("state")
        node.kill()
        assert node.processes() == []
        assert not any(is_running(pid) for pid in pids)
        assert node.wait(1) == -signal.SIGKILL
        assert list(node.memory_base.iterdir()) == []


def test_kill_can_keep_the_memory() -> None:
    with LocalCluster(nodes=1) as cluster:
        node = cluster.nodes[0]
        node.start(["sleep 600"], program=SH)
        (node.memory_base / "slot").write_text("state")
        node.kill(keep_memory=True)
        assert (node.memory_base / "slot").exists()
        node.start(["exit 0"], program=SH)
        assert node.wait(10) == 0


def test_freeze_stops_every_process_and_thaw_continues_them() -> None:
    with LocalCluster(nodes=1) as cluster:
        node = cluster.nodes[0]
        node.start(["sleep 600 & sleep 600"], program=SH)
        pids = cluster.wait_for(lambda: p if len(p := node.processes()) == 3 else None, 10, "three processes")
        node.freeze()
        assert cluster.wait_for(lambda: all(state_of(pid) == "T" for pid in pids), 10, "the freeze")
        node.thaw()
        assert cluster.wait_for(lambda: all(state_of(pid) in "SR" for pid in pids), 10, "the thaw")


def test_kill_worker_finds_the_process_by_its_beacon() -> None:
    with LocalCluster(nodes=2) as cluster:
        for index, rank in ((0, 1), (1, 0)):  # node ranks go by arrival
            node = cluster.nodes[index]
            node.start(["sleep 600 & wait; echo seen; sleep 600"], program=SH)
            worker = cluster.wait_for(
                lambda node=node: next((p for p in node.processes() if p != node.pid), None), 10, "a child"
            )
            memory = NodeMemory.claim(cluster.run_id, node.memory_base)
            memory.save_notes({"node_rank": rank})
            state = BeaconState(worker, "training", 5 + index, 0, 0, 0.0, 0.0, 0, 0.0)
            Beacon(memory.paths.beacon(0), writable=True).write(state)
            memory.release(remove=False)
        assert cluster.iteration() == 5
        victim = cluster.nodes[0].worker_pid()
        assert cluster.kill_worker(rank=1) == victim
        cluster.wait_for(lambda: "seen" in cluster.nodes[0].output(), 10, "the death of the child")
        assert "seen" not in cluster.nodes[1].output()
        cluster.wait_for(lambda: cluster.nodes[0].worker_pid() is None, 10, "the worker being gone")
        with pytest.raises(RuntimeError, match="no living worker"):
            cluster.kill_worker(rank=1)


def test_wait_timeout_shows_the_output() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.nodes[0].start(["echo stuck here; sleep 600"], program=SH)
        cluster.wait_for(cluster.nodes[0].output, 10, "output")
        with pytest.raises(WaitTimeout, match="stuck here"):
            cluster.nodes[0].wait(0)


def test_a_raising_body_leaves_no_process_no_memory_and_no_directory(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ZeroDivisionError), LocalCluster(nodes=1) as cluster:
        node = cluster.nodes[0]
        node.start(["echo last words; (setsid sleep 600 &); sleep 600"], program=SH)
        cluster.wait_for(lambda: len(node.processes()) == 3, 10, "three processes")
        marker = node._environment[MARKER]
        raise ZeroDivisionError
    assert marked_processes(marker) == []
    assert not cluster.home.parent.exists()
    assert not node.memory_base.parent.exists()
    assert "last words" in capfd.readouterr().err


def test_starting_twice_is_refused() -> None:
    with LocalCluster(nodes=1) as cluster:
        cluster.nodes[0].start(["sleep 600"], program=SH)
        with pytest.raises(RuntimeError, match="runs already"):
            cluster.nodes[0].start(["sleep 600"], program=SH)


def test_options_say_who_hosts_the_store() -> None:
    with LocalCluster(nodes=2, workers_per_node=3) as cluster:
        options = cluster.options(1)
        assert "--nnodes=2" in options and "--nproc-per-node=3" in options
        assert "--rdzv-conf=is_host=0" in options
        assert f"--rdzv-endpoint=127.0.0.1:{cluster.port}" in options


@needs_namespaces
def test_each_node_has_its_own_shared_memory_of_the_size_asked() -> None:
    before = set(os.listdir("/dev/shm"))
    with LocalCluster(nodes=2, kind="shm", shm_bytes=4 * 2**20) as cluster:
        first, second = cluster.nodes
        first.start(["df -k --output=size /dev/shm | tail -1; echo state > /dev/shm/slot; sleep 600"],
                    program=SH)  # fmt: skip
        cluster.wait_for((first.memory_base / "slot").exists, 10, "the file")
        assert first.output().split() == ["4096"]
        second.start(["ls /dev/shm"], program=SH)
        assert second.wait(10) == 0 and second.output() == ""
        assert set(os.listdir("/dev/shm")) == before
        first.kill()
        first.start(["ls /dev/shm; df -k --output=size /dev/shm | tail -1"], program=SH)
        assert first.wait(10) == 0
        assert first.output().split() == ["4096"]  # empty, and of the same size
        mounts = [str(first.memory_base), str(second.memory_base)]
    assert not any(mount in Path("/proc/self/mounts").read_text() for mount in mounts)


@needs_namespaces
def test_memory_of_an_agent_in_its_namespace_is_found_from_outside(tmp_path: Path) -> None:
    memory = SharedMemory(tmp_path / "shm", 2**20)
    try:
        (run_memory("run", memory.directory) / "node").mkdir(parents=True)
        memory.lose()
        assert list(memory.directory.iterdir()) == []
    finally:
        memory.close()
    assert not memory.directory.exists()
    memory.close()  # idempotent


LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(b"pong")
    peer.close()
"""
CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as peer:
        print(peer.recv(4).decode())
except OSError as error:
    print(type(error).__name__)
"""


@needs_networks
def test_network_nodes_reach_each_other_until_the_link_is_cut() -> None:
    python = [sys.executable, "-S", "-u", "-c"]
    names = set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
    with LocalCluster(nodes=2, kind="net", rate="100mbit") as cluster:
        server, client = cluster.nodes
        server.start([LISTEN, server.address], program=python)
        cluster.wait_for(lambda: "ready" in server.output(), 10, "the server")

        def ask(seconds: str) -> str:
            client.start([CONNECT, server.address, seconds], program=python)
            assert client.wait(30) == 0
            return client.output().strip()

        assert ask("10") == "pong"
        server.cut_link()
        assert ask("0.5") in ("TimeoutError", "OSError")  # silence, or no route once the address expired
        server.restore_link()
        assert ask("10") == "pong"
        assert set(os.listdir("/run/netns")) > names
    assert set(os.listdir("/run/netns")) == names


@needs_networks
def test_network_nodes_have_shared_memory_of_their_own() -> None:
    with LocalCluster(nodes=1, kind="net", shm_bytes=2**20) as cluster:
        cluster.nodes[0].start(["df -k --output=size /dev/shm | tail -1"], program=SH)
        assert cluster.nodes[0].wait(10) == 0
        assert cluster.nodes[0].output().split() == ["1024"]


def test_links_belong_to_network_nodes_alone() -> None:
    with LocalCluster(nodes=1) as cluster:
        with pytest.raises(RuntimeError, match="link"):
            cluster.nodes[0].cut_link()
        assert str(cluster.nodes[0].memory_base).startswith(str(DEFAULT_MEMORY_BASE))
    with pytest.raises(ValueError, match="net"):
        LocalCluster(rate="1mbit")
