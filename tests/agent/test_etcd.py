"""The etcd client, torch's rendezvous state and store over it, and members that nodes run themselves: a real etcd."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from test_rendezvous import Node
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from gemini_run.agent import etcd_member
from gemini_run.agent.etcd import EtcdClient, parse_endpoints
from gemini_run.agent.etcd_member import EtcdMember, few_members_warning, places
from gemini_run.agent.etcd_rendezvous import EtcdBackend, EtcdStore, create
from gemini_run.config import Settings
from gemini_run.errors import ConfigError
from gemini_run.testing.etcd import EtcdCluster
from gemini_run.testing.processes import free_port
from gemini_run.wire import RunPaths


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    with EtcdCluster(3) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("h1:2379,h2:2379", ["http://h1:2379", "http://h2:2379"]),
        ("h1, https://h2:1/", ["http://h1:2379", "https://h2:1"]),
        ("[::1]:5,[fe80::1]", ["http://[::1]:5", "http://[fe80::1]:2379"]),
    ],
)
def test_endpoints(text: str, urls: list[str]) -> None:
    assert parse_endpoints(text) == urls


@pytest.mark.parametrize("text", ["", ",", "h:port", "ftp://h:1", ":1"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_endpoints(text)


def test_the_rendezvous_state_is_written_by_one_of_those_who_saw_it(cluster: EtcdCluster) -> None:
    one, two = (EtcdBackend(EtcdClient(cluster.urls), "etcd-v3", "/test/state") for _ in range(2))
    assert one.get_state() is None
    written = one.set_state(b"first")
    assert written is not None and written[0] == b"first" and written[2]
    late = two.set_state(b"second")  # without a token: only if there is none
    assert late is not None and (late[0], late[2]) == (b"first", False)
    again = two.set_state(b"second", late[1])
    assert again is not None and (again[0], again[2]) == (b"second", True)
    stale = one.set_state(b"third", written[1])
    assert stale is not None and (stale[0], stale[2]) == (b"second", False)
    assert one.get_state() == (b"second", again[1])
    # The answer to a write got lost and it is asked again: it is found to be there.
    repeated = two.set_state(b"second", late[1])
    assert repeated is not None and repeated[2]


def test_a_store_under_torchs_prefix(cluster: EtcdCluster) -> None:
    client = EtcdClient(cluster.urls)
    base = EtcdStore(client, "/test/store/", timedelta(seconds=0.3))
    store = dist.PrefixStore("a", base)
    assert not store.check(["x"])
    store.set("x", "text")
    store.set("y", b"\x00\xff")
    assert store.get("x") == b"text"
    assert store.multi_get(["x", "y"]) == [b"text", b"\x00\xff"]
    assert store.check(["x", "y"]) and not store.check(["x", "z"])
    assert dist.PrefixStore("b", base).check(["x"]) is False
    assert store.compare_set("x", "text", "new") == b"new"
    assert store.compare_set("x", "text", "newer") == b"new"
    assert store.compare_set("fresh", "", "v") == b"v"
    assert store.compare_set("absent", "something", "v") == b"something"
    with pytest.raises(dist.DistStoreError, match="z"):
        store.get("z")
    timer = threading.Timer(0.1, EtcdStore(client, "/test/store/").set, ("a/z", "late"))
    timer.start()
    assert store.get("z") == b"late"


def test_counting_at_the_same_time(cluster: EtcdCluster) -> None:
    sums: list[int] = []

    def count() -> None:
        store = EtcdStore(EtcdClient(cluster.urls), "/test/count/")
        sums.extend(store.add("n", 2) for _ in range(10))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == list(range(2, 82, 2))


def test_what_a_run_writes_does_not_stay_for_ever(cluster: EtcdCluster) -> None:
    client = EtcdClient(cluster.urls)
    client.put("/test/lease", b"x")
    [kv] = client._call("kv/range", {"key": "L3Rlc3QvbGVhc2U="})["kvs"]
    assert int(kv["lease"]) != 0


def test_nobody_there() -> None:
    client = EtcdClient([f"http://127.0.0.1:{free_port()}"], patience=0.2)
    with pytest.raises(RendezvousConnectionError, match="refused"):
        client.get("/")
    params = RendezvousParameters("etcd-v3", f"127.0.0.1:{free_port()}", "run", 1, 1)
    with pytest.raises(ConfigError, match="no member of etcd answers"):
        create(params)
    params = RendezvousParameters("etcd-v3", "127.0.0.1:none", "run", 1, 1)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:none"):
        create(params)


def test_one_member_of_three_may_die_and_come_back() -> None:
    with EtcdCluster(3) as cluster:
        client = EtcdClient(cluster.urls, patience=20.0)
        client.put("/k", b"0")
        for index in range(3):  # one of them is the leader
            cluster.kill(index)
            client.put("/k", str(index).encode())
            cluster.start(index)
            cluster.wait_until_it_serves()
            entry = client.get("/k")
            assert entry is not None and entry.value == str(index).encode()
        cluster.kill(0)
        cluster.kill(1)
        client.patience = 0.3
        with pytest.raises(RendezvousConnectionError):
            client.put("/k", b"no majority")


def test_etcd_goes_and_comes_back_while_training_is_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    with EtcdCluster(1) as cluster:
        params = RendezvousParameters("etcd-v3", cluster.endpoint, "run", 1, 1, local_addr="127.0.0.1")
        node = Node("run", create(params), tmp_path, Settings(), paths)
        try:
            assert node.next().number == 0
            backend = node.rendezvous._membership._handler._state_holder._backend
            backend.client.patience = 0.2
            cluster.kill(0)
            assert [node.rendezvous.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
            cluster.start(0)
            cluster.wait_until_it_serves()
            node.rendezvous._ask_again_at = 0.0
            assert node.rendezvous.num_nodes_waiting() == 0
            said = capfd.readouterr().err
            assert said.count("training goes on meanwhile") == 1 and said.count("is reached again") == 1
            # It is needed for the next round: that waits until it is there.
            cluster.kill(0)
            timer = threading.Timer(0.5, cluster.start, (0,))
            timer.start()
            assert node.next().number == 1
        finally:
            node.ends()


def test_member_places() -> None:
    assert [place.name for place in places("a,b:30000")] == ["a:29400", "b:30000"]
    with pytest.raises(ConfigError, match="overlap"):
        places("a:29400,a:29401")
    assert few_members_warning(places("a,b,c")) is None
    assert "2 node(s)" in str(few_members_warning(places("a,b")))


def test_no_etcd_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(etcd_member.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"gemini-run\[etcd\]"):
        etcd_member.find_program()


def test_a_lost_member_is_replaced_by_one_that_remembers_nothing(tmp_path: Path) -> None:
    endpoint = ",".join(f"127.0.0.1:{port}" for port in _pairs_of_ports(3))
    members = [EtcdMember(endpoint, "run", tmp_path) for _ in range(3)]
    try:
        assert [member.place.name for member in members if member.place] == endpoint.split(",")
        client_only = EtcdMember(endpoint, "run", tmp_path)
        assert client_only.place is None
        starting = [threading.Thread(target=member.start, args=(60.0,)) for member in members]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join()
        client_only.start(60.0)
        client_only.client.put("/k", b"before")
        for index in range(2):  # none is special
            members[index].stop()  # its data goes with it, as with its node
            members[index] = EtcdMember(endpoint, "run", tmp_path)
            assert members[index].place is not None
            members[index].start(60.0)
            entry = members[index].client.get("/k")
            assert entry is not None and entry.value == b"before"
        assert len(client_only.client.members()) == 3
    finally:
        for member in members:
            member.stop()


def test_a_member_that_is_killed_comes_back_on_its_data(tmp_path: Path) -> None:
    [port] = _pairs_of_ports(1)
    member = EtcdMember(f"127.0.0.1:{port}", "run", tmp_path)
    try:
        member.start(60.0)
        member.client.put("/k", b"kept")
        assert member._process is not None
        member._process.kill()
        member.client.patience = 30.0
        entry = member.client.get("/k")
        assert entry is not None and entry.value == b"kept"
    finally:
        member.stop()


def _pairs_of_ports(count: int) -> list[int]:
    """Ports of which the next is free, too."""
    found: list[int] = []
    while len(found) < count:
        port = free_port()
        place = etcd_member.Place("127.0.0.1", port)
        if etcd_member._is_free_here(place) and not {port - 1, port, port + 1} & set(found):
            found.append(port)
    return found
