"""Signals to the launcher: what goes on to the workers, what ends the run, and that neither loses anything."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jobs import GEMINI_RUN, PATIENCE, TORCHRUN, environment, events, living, script, started_job, wait_until
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api

from gemini_run.agent import elastic, signals
from gemini_run.agent.process import WorkerProcess
from gemini_run.agent.signals import Forwarder, caught_signals, send_if_caught
from gemini_run.testing.nodes import free_port

STATUS = """Name:\tpython3 (SigCgt:\tff)
State:\tS (sleeping)
SigBlk:\t0000000000000000
SigIgn:\t0000000001001000
SigCgt:\t0000000100000a02
Speculation_Store_Bypass:\tvulnerable
"""


def test_the_caught_signals_of_a_process() -> None:
    assert caught_signals(STATUS) == {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, 33}
    assert caught_signals("SigCgt:\t0000000000000000\n") == frozenset()
    with pytest.raises(ValueError, match="SigCgt"):
        caught_signals("Name:\tpython3\n")


PAUSED = """
import signal
signal.signal(signal.SIGUSR1, lambda number, frame: print("got", number, flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_signal_is_sent_to_who_catches_it() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", PAUSED], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        worker = WorkerProcess(child.pid)
        assert not send_if_caught(worker, signal.SIGUSR2), "it would end the worker"
        assert send_if_caught(worker, signal.SIGUSR1)
        assert child.stdout.readline() == f"got {signal.SIGUSR1.value}\n"
    finally:
        child.kill()
        child.communicate()
    assert not send_if_caught(worker, signal.SIGUSR1), "it has ended"


class Fake:
    """A worker of a Forwarder's."""

    def __init__(self, pid: int, *caught: signal.Signals) -> None:
        self.pid = self.pidfd = pid
        self.returncode: int | None = None
        self.caught = set(caught)
        self.got: list[signal.Signals] = []

    def send(self, number: signal.Signals) -> bool:
        if number in self.caught:
            self.got.append(number)
        return number in self.caught


class Desk:
    """A Forwarder, a clock, and what it said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stepped: set[int] = set()
        self.events: list[tuple[str, str, list[int]]] = []
        self.forwarder = Forwarder(
            self._event, lambda: self.stepped, send=lambda worker, number: worker.send(number), clock=lambda: self.now
        )

    def _event(self, name: str, signal: str, outcome: str, ranks: list[int]) -> None:
        assert name == "user_signal"
        self.events.append((signal, outcome, ranks))

    def round(self, *workers: Fake) -> None:
        self.forwarder.workers_started(dict(enumerate(workers)))


@pytest.fixture
def desk() -> Iterator[Desk]:
    before = {number: signal.getsignal(number) for number in signals.FORWARDED}
    signals.hold()
    yield Desk()
    signals._received.clear()
    for number, handler in before.items():
        signal.signal(number, handler)


USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


def test_each_worker_that_catches_it_gets_it_once(desk: Desk, capfd: Any) -> None:
    one, two = Fake(1, USR1), Fake(2, USR1, USR2)
    desk.round(one, two)
    desk.stepped = {1, 2}
    for number in (USR1, USR2):
        signal.raise_signal(number)
    desk.forwarder.turn()
    desk.forwarder.turn()
    assert (one.got, two.got) == ([USR1], [USR1, USR2])
    assert desk.events == [("SIGUSR1", "forwarded", [0, 1]), ("SIGUSR2", "forwarded", [1])]
    signal.raise_signal(USR1)
    desk.forwarder.turn()
    assert one.got == [USR1, USR1]
    desk.forwarder.close()
    assert len(desk.events) == 3
    assert capfd.readouterr().err.splitlines()[0] == "gemini-run: SIGUSR1 forwarded to rank 0, 1"


@pytest.mark.parametrize("trained", [True, False], ids=["trains", "long after its start"])
def test_what_nobody_catches_is_ignored_once_nobody_will(desk: Desk, capfd: Any, trained: bool) -> None:
    worker = Fake(1)
    desk.round(worker)
    signal.raise_signal(USR1)
    desk.forwarder.turn()
    assert desk.events == [], "its script may be about to set up a handler"
    if trained:
        desk.stepped = {1}
    else:
        desk.now = signals.SET_UP_SECONDS + 1
    desk.forwarder.turn()
    assert desk.events == [("SIGUSR1", "ignored", [])]
    assert "SIGUSR1 ignored: no worker of this node catches it" in capfd.readouterr().err
    desk.forwarder.close()
    assert len(desk.events) == 1


def test_a_worker_that_comes_to_catch_it_gets_it_then(desk: Desk) -> None:
    early, late, never = Fake(1, USR1), Fake(2), Fake(3)
    desk.round(early, late, never)
    signal.raise_signal(USR1)
    desk.forwarder.turn()
    late.caught.add(USR1)
    desk.forwarder.turn()
    assert (early.got, late.got, desk.events) == ([USR1], [USR1], [])
    never.returncode = 0
    desk.forwarder.turn()
    assert desk.events == [("SIGUSR1", "forwarded", [0, 1])]


def test_without_workers_it_waits_for_the_next_round(desk: Desk) -> None:
    signal.raise_signal(USR1)
    signal.raise_signal(USR1)  # that nobody has yet: still one
    desk.forwarder.turn()
    gone, next_one = Fake(1, USR1), Fake(2, USR1)
    gone.returncode = -9
    desk.round(gone)
    desk.forwarder.turn()
    desk.round(next_one)
    desk.forwarder.turn()
    assert (gone.got, next_one.got) == ([], [USR1])
    assert desk.events == [("SIGUSR1", "forwarded", [0])]


def test_what_reached_nobody_until_the_end_is_said_to_be_dropped(desk: Desk, capfd: Any) -> None:
    signal.raise_signal(USR2)
    desk.forwarder.turn()
    signal.raise_signal(USR1)  # after the last turn
    desk.forwarder.close()
    assert desk.events == [("SIGUSR2", "dropped", []), ("SIGUSR1", "dropped", [])]
    assert "SIGUSR1 dropped: the run ended here before a worker could take it" in capfd.readouterr().err


# --- real jobs -------------------------------------------------------------------------------------

#: argv: folder. Says which signals came, in a file for each rank; ends at the first.
CATCH = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
got = []
for name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
    signal.signal(getattr(signal, name), lambda number, frame: got.append(signal.Signals(number).name))
(folder / f"ready{rank}").write_text(str(os.getpid()))
while not got:
    time.sleep(0.02)
(folder / f"got{rank}").write_text(" ".join(got))
sys.exit(0 if got[0].startswith("SIGUSR") else 1)
"""

#: argv: folder. Trains until it is told to end; catches nothing.
WAIT = """
import itertools, os, sys, time
from pathlib import Path
import gemini_run
folder = Path(sys.argv[1])
checkpointer = gemini_run.Checkpointer(state={})
for step in itertools.count(checkpointer.restore()):
    checkpointer.step()
    (folder / f"ready{os.environ['RANK']}").touch()
    time.sleep(0.02)
    if (folder / "end").exists():
        break
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def ready(folder: Path, ranks: str = "01") -> bool:
    return all((folder / f"ready{rank}").exists() for rank in ranks)


def reached(folder: Path, ranks: str = "01") -> list[str]:
    return [(folder / f"got{rank}").read_text() for rank in ranks]


@pytest.mark.cluster
@pytest.mark.parametrize("ours", [(), ("--no-zygote",)], ids=["zygote", "cold"])
def test_user_signals_reach_running_workers(home: Path, tmp_path: Path, ours: tuple[str, ...]) -> None:
    with started_job(home, *ours, "--nproc-per-node=2", script(tmp_path, CATCH), tmp_path) as job:
        wait_until(lambda: ready(tmp_path), "workers run")
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    assert reached(tmp_path) == ["SIGUSR1", "SIGUSR1"]
    [event] = events(home, "user_signal")
    assert (event["signal"], event["outcome"], event["ranks"]) == ("SIGUSR1", "forwarded", [0, 1])
    assert output.count("SIGUSR1") == 1 and len(events(home, "zygote_forked")) == (0 if ours else 2)


@pytest.mark.cluster
def test_user_signals_that_no_worker_catches_end_nothing(home: Path, tmp_path: Path) -> None:
    with started_job(home, script(tmp_path, WAIT), tmp_path) as job:
        wait_until(lambda: ready(tmp_path, "0"), "the worker trains")
        for number in signals.FORWARDED:
            job.send_signal(number)
        wait_until(lambda: len(events(home, "user_signal")) == 2, "both were judged")
        (tmp_path / "end").touch()
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    found = sorted((event["signal"], event["outcome"], event["ranks"]) for event in events(home, "user_signal"))
    assert found == [("SIGUSR1", "ignored", []), ("SIGUSR2", "ignored", [])]


@pytest.mark.cluster
def test_a_user_signal_while_a_round_forms_reaches_its_workers(home: Path, tmp_path: Path) -> None:
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=r"]
    words += [str(script(tmp_path, CATCH)), str(tmp_path)]
    with started_job(home, *words) as one:
        wait_until(lambda: events(home, "run_started"), "an agent runs")
        one.send_signal(signal.SIGUSR1)
        with started_job(home, *words) as two:
            wait_until(lambda: ready(tmp_path), "workers run")
            two.send_signal(signal.SIGUSR2)
            assert (one.wait(PATIENCE), two.wait(PATIENCE)) == (0, 0)
    assert sorted(reached(tmp_path)) == ["SIGUSR1", "SIGUSR2"]


@pytest.mark.cluster
@pytest.mark.parametrize("ours", [(), ("--no-zygote",)], ids=["zygote", "cold"])
def test_a_user_signal_during_recovery_reaches_the_new_workers(
    home: Path, tmp_path: Path, ours: tuple[str, ...]
) -> None:
    dies = (
        "import os\nif os.environ['GEMINI_RESTART_GENERATION'] + os.environ['RANK'] == '01': os.kill(os.getpid(), 9)\n"
    )
    with started_job(home, *ours, "--nproc-per-node=2", script(tmp_path, dies + CATCH), tmp_path) as job:
        wait_until(lambda: events(home, "worker_failed"), "rank 1 has died")
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    assert reached(tmp_path) == ["SIGUSR1", "SIGUSR1"]
    [event] = events(home, "user_signal")
    assert (event["outcome"], event["ranks"]) == ("forwarded", [0, 1])


@pytest.mark.cluster
def test_a_node_that_waits_for_others_is_ended(home: Path, tmp_path: Path) -> None:
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=r"]
    with started_job(home, *words, script(tmp_path, WAIT), tmp_path) as job:
        wait_until(lambda: events(home, "run_started"), "its agent runs")
        job.send_signal(signal.SIGUSR1)
        wait_until(lambda: "rendezvous" in _phases(home), "it waits")
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, output
    assert [event["signal"] for event in events(home, "node_stopped")] == ["SIGTERM"]
    assert [event["outcome"] for event in events(home, "user_signal")] == ["dropped"]
    assert "SIGUSR1 dropped" in output and "stopped: got SIGTERM" in output
    assert not list(home.with_name("home-memory").glob("gemini-run-*/*/*")), "its memory directory is released"


def _phases(home: Path) -> str:
    return " ".join(path.read_text() for path in home.glob("runs/*/nodes/*.json"))


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_that_end_are_torchruns(number: signal.Signals, tmp_path: Path) -> None:
    path = script(tmp_path, CATCH)

    def run(launcher: list[str], folder: Path) -> tuple[int, list[str]]:
        folder.mkdir()
        words = [*launcher, "--standalone", "--nproc-per-node=2", str(path), str(folder)]
        job = subprocess.Popen(words, env=environment(folder / "home"), stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: ready(folder), "workers run")
            job.send_signal(number)
            return job.wait(PATIENCE), reached(folder)
        finally:
            job.kill()
            job.wait()
            for rank in "01" if ready(folder) else "":  # torchrun leaves its workers behind
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((folder / f"ready{rank}").read_text()), signal.SIGKILL)

    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(run, [*GEMINI_RUN], tmp_path / "mine")
        theirs = pool.submit(run, [*TORCHRUN], tmp_path / "theirs")
        assert mine.result() == theirs.result() == (1, [number.name] * 2)


def test_a_signal_that_comes_while_workers_are_started_is_taken_once_all_run() -> None:
    """torch has no handle on the workers yet: they would be killed without it."""
    started = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SignalException) as caught, elastic._signals_put_off():
            signal.signal(signal.SIGTERM, multiprocessing_api._terminate_process_handler)  # as torch does
            for worker in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                started.append(worker)
        assert started == [0, 1] and caught.value.sigval == signal.SIGTERM
        with pytest.raises(SignalException):  # from then on at once
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.cluster
def test_under_nohup_a_hangup_ends_nothing(home: Path, tmp_path: Path) -> None:
    words = ["nohup", *GEMINI_RUN, "--no-zygote", str(script(tmp_path, CATCH)), str(tmp_path)]
    job = subprocess.Popen(words, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: ready(tmp_path, "0"), "the worker runs")
        job.send_signal(signal.SIGHUP)
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=PATIENCE)
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, output
    assert reached(tmp_path, "0") == ["SIGUSR1"]


@pytest.mark.cluster
def test_signals_to_handle_may_name_user_signals(home: Path, tmp_path: Path) -> None:
    words = ["--no-zygote", "--signals-to-handle=SIGTERM,SIGUSR2", script(tmp_path, CATCH), tmp_path]
    with started_job(home, *words) as job:
        wait_until(lambda: ready(tmp_path, "0"), "the worker runs")
        job.send_signal(signal.SIGUSR2)
        assert job.wait(PATIENCE) == 1, "as torchrun: it ends the run"
    assert reached(tmp_path, "0") == ["SIGUSR2"] and not events(home, "user_signal")
    assert [event["signal"] for event in events(home, "node_stopped")] == ["SIGUSR2"]


#: argv: folder, seconds. After SIGTERM it needs so long to put its things in order.
SLOW_END = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
def end(number, frame):
    time.sleep(float(sys.argv[2]))
    (folder / f"got{rank}").write_text("in order")
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
(folder / f"ready{rank}").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


@pytest.mark.cluster
@pytest.mark.parametrize(("timeout", "seconds", "done"), [(60, 4, True), (1, 600, False)])
def test_workers_have_the_shutdown_timeout_to_end(
    home: Path, tmp_path: Path, timeout: int, seconds: int, done: bool
) -> None:
    words = [f"--shutdown-timeout={timeout}", "--nproc-per-node=2", script(tmp_path, SLOW_END), tmp_path, seconds]
    with started_job(home, *words) as job:
        wait_until(lambda: ready(tmp_path), "workers run")
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE) == 1
    assert [(tmp_path / f"got{rank}").exists() for rank in "01"] == [done] * 2
    workers = {int((tmp_path / f"ready{rank}").read_text()) for rank in "01"}
    assert not living(workers)


#: argv: folder. Writes down what comes, and ends at nothing.
STUBBORN = """
import os, signal, sys, time
from pathlib import Path
got = Path(sys.argv[1], "got" + os.environ["RANK"])
def note(number, frame):
    with got.open("a") as file:
        file.write(signal.Signals(number).name + " ")
for name in ("SIGTERM", "SIGINT"):
    signal.signal(getattr(signal, name), note)
Path(sys.argv[1], "ready" + os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


@pytest.mark.cluster
def test_repeated_signals_leave_no_worker_behind(home: Path, tmp_path: Path) -> None:
    words = ["--shutdown-timeout=100", "--nproc-per-node=2", script(tmp_path, STUBBORN), tmp_path]
    with started_job(home, *words) as job:
        wait_until(lambda: ready(tmp_path), "workers run")
        workers = {int((tmp_path / f"ready{rank}").read_text()) for rank in "01"}
        for seen in (["SIGINT"], ["SIGINT", "SIGTERM"]):
            job.send_signal(signal.SIGINT)
            wait_until(
                lambda seen=seen: [text.split() for text in heard(tmp_path)] == [seen] * 2,
                f"workers have {seen}",
            )
        assert job.poll() is None, "they have the whole --shutdown-timeout"
        job.send_signal(signal.SIGINT)
        assert job.wait(PATIENCE) == 1
    assert not living(workers)


def heard(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("got?"))]
