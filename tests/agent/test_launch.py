"""gemini-run starts small scripts for real: what torchrun's users rely on, and recovery of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs import TORCHRUN, environment, events, living, run_job, script, started_job, wait_until

from gemini_run.testing.nodes import free_port

pytestmark = pytest.mark.cluster

ENDINGS = """
import os, signal, sys
how = sys.argv[1]
if os.environ["RANK"] == "1":
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "raise":
        raise ValueError("on purpose")
    if how == "message":
        sys.exit("on purpose")
    sys.exit(int(how))
"""

SHOW = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps({
    "argv": sys.argv, "name": __name__, "env": dict(os.environ), "torch": "torch" in sys.modules}))
"""

#: rank 1 ends itself once, at the first start of the job
ONCE = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
marker = Path(sys.argv[1])
generation = os.environ["GEMINI_RESTART_GENERATION"]
with open(marker, "a") as file:
    file.write(f"{generation} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['RANK']} {int(value)}\\n")
if generation == "0" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), 9)
dist.barrier()
print("hello from", generation, os.environ["RANK"])
dist.destroy_process_group()
"""

STEPS = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
import gemini_run
dist.init_process_group("gloo")
value = torch.ones(1)
for step in gemini_run.Checkpointer(state={"value": value}).steps(int(sys.argv[2])):
    dist.all_reduce(value)
Path(sys.argv[1], os.environ["RANK"]).write_text(os.environ["MASTER_PORT"])
dist.destroy_process_group()
"""

#: argv: file. A launcher of its own within a worker; what its worker sees goes into the file.
NESTED = """
import json, os, subprocess, sys
if len(sys.argv) > 2:
    found = {
        "gemini": [name for name in sys.modules if name.startswith("gemini_run")],
        "torch": "torch" in sys.modules,
        "hook": sys.excepthook is sys.__excepthook__,
        "boot": [name for name in ("GEMINI_BOOT", "PYTHONPATH") if name in os.environ],
        "world": os.environ["WORLD_SIZE"],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)
else:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    subprocess.run([*launcher, __file__, sys.argv[1], "inner"], check=True)
"""

LINGER = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "1000"])
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()}")
time.sleep(1000)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.parametrize("how", ["0", "7", "kill", "segv", "raise", "message"])
def test_exit_codes_are_torchruns(how: str, home: Path, tmp_path: Path) -> None:
    path = script(tmp_path, ENDINGS)
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    mine = run_job(home, *words, "--no-zygote", path, how)
    assert mine.returncode == (0 if how == "0" else 1), mine.stderr
    if how in ("7", "kill"):  # torchrun's codes are these
        theirs = subprocess.run(
            [*TORCHRUN, *words, path, how], env=environment(home), capture_output=True, text=True, timeout=120
        )
        assert mine.returncode == theirs.returncode
    assert "fault of gemini-run" not in mine.stderr
    if how == "0":
        assert [event["event"] for event in events(home, "run_succeeded")] == ["run_succeeded"]
    else:
        [failure] = events(home, "worker_failed")
        assert failure["rank"] == 1
        assert failure["signal"] == {"kill": "SIGKILL", "segv": "SIGSEGV"}.get(how)
        assert events(home, "run_failed")
        cause = {"kill": "killed by SIGKILL", "segv": "killed by SIGSEGV", "7": "exited with code 7"}.get(how, "")
        assert cause in run_job(home, "status").stdout


def test_argv_environment_and_main_are_the_scripts(home: Path, tmp_path: Path) -> None:
    odd = ["--r=16", "--log=x", "--n=3", "--logs", "d", "--g=1", "--replicas=9", "--re", "", "a b", "--", "-m"]
    done = run_job(home, "--nproc-per-node", 2, script(tmp_path, SHOW), tmp_path, *odd)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "gemini-run's own lines belong on standard error"
    for rank in "01":
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["argv"] == [str(tmp_path / "script.py"), str(tmp_path), *odd]
        assert seen["name"] == "__main__"
        assert seen["torch"], "it came from the zygote"
        assert seen["env"]["TORCHELASTIC_MAX_RESTARTS"] == "10"
        assert "PYTHONPATH" not in seen["env"]
        assert json.loads(seen["env"]["GEMINI_WORKER"])["round"] == 0
    assert len(events(home, "zygote_forked")) == 2


def test_module_and_program(home: Path, tmp_path: Path) -> None:
    script(tmp_path, SHOW)
    done = run_job(home, "--no-zygote", "-m", "script", tmp_path, "--logs", "d", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "0.json").read_text())
    assert seen["argv"][1:] == [str(tmp_path), "--logs", "d"]
    assert seen["env"]["PYTHONPATH"] == str(tmp_path)
    done = run_job(home, "--no-python", "sh", "-c", "echo $RANK/$WORLD_SIZE ${PYTHONPATH-unset}")
    assert (done.returncode, done.stdout) == (0, "0/1 unset\n"), done.stderr


def test_run_id_and_run_json(home: Path, tmp_path: Path) -> None:
    done = run_job(
        home, "--standalone", "--rdzv-id=my run", "--no-zygote", "--snapshot-interval", 3, script(tmp_path, "")
    )
    assert done.returncode == 0, done.stderr
    assert "gemini-run: run my run" in done.stderr.splitlines()
    [path] = (home / "runs").glob("*/run.json")
    facts = json.loads(path.read_text())
    assert facts["version"] == 1
    assert facts["run_id"] == "my run"
    assert facts["script"] == str(tmp_path / "script.py")
    assert facts["settings"]["snapshot_interval"] == 3
    assert facts["argv"][-1] == str(tmp_path / "script.py")


@pytest.mark.parametrize("way", ["standalone", "c10d", "static"])
def test_a_killed_worker_comes_back(way: str, home: Path, tmp_path: Path) -> None:
    marker, logs = tmp_path / "marker", tmp_path / "logs"
    rendezvous = {
        "standalone": ["--standalone"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=r"],
        "static": ["--master-addr=localhost", f"--master-port={free_port()}"],
    }
    words = [*rendezvous[way], "--nproc-per-node=2", "--log-dir", logs, "--tee", 3, script(tmp_path, ONCE), marker]
    done = run_job(home, *words)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in marker.read_text().splitlines())
    assert lines == [[g, g, rank, "2"] for g in "01" for rank in "01"]
    [failure] = events(home, "worker_failed")
    assert (failure["rank"], failure["signal"], failure["cause"]) == (1, "SIGKILL", "killed by SIGKILL")
    assert f"worker rank 1 (pid {failure['pid']}) was killed by SIGKILL; recovering" in done.stderr
    # No round's log folder is lost, and tee shows what was printed.
    assert sorted(path.name for path in logs.glob("*/attempt_*")) == ["attempt_0", "attempt_1"]
    assert "[default0]:hello from 1 0" in done.stdout


@pytest.mark.parametrize("ours", [(), ("--no-zygote",)], ids=["zygote", "cold"])
def test_a_launcher_within_a_worker_is_plain_torchrun(ours: tuple[str, ...], home: Path, tmp_path: Path) -> None:
    done = run_job(home, *ours, script(tmp_path, NESTED), tmp_path / "found")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found == {"gemini": [], "torch": False, "hook": True, "boot": [], "world": "1"}


def test_the_same_exception_twice_ends_the_run(home: Path, tmp_path: Path) -> None:
    done = run_job(home, "--no-zygote", "--nproc-per-node=2", script(tmp_path, ENDINGS), "raise")
    assert done.returncode == 1
    assert len(events(home, "worker_failed")) == 2
    assert "the same exception at the same iteration twice in a row" in done.stderr
    assert "ValueError: on purpose" in str(events(home, "run_failed")[-1]["cause"])


def test_the_error_file_of_the_launcher_is_filled_in(home: Path, tmp_path: Path) -> None:
    error_file = tmp_path / "launcher.json"
    words = ["--no-zygote", "--max-restarts=0", "--nproc-per-node=2", script(tmp_path, ENDINGS), "raise"]
    done = run_job(home, *words, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert done.returncode == 1
    left: Any = json.loads(error_file.read_text())
    assert "ValueError: on purpose" in left["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(("number", "zygote"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_nothing_outlives_the_agent(number: signal.Signals, zygote: bool, home: Path, tmp_path: Path) -> None:
    options = [] if zygote else ["--no-zygote"]
    folder = tmp_path / "pids"
    folder.mkdir()
    with started_job(home, *options, "--nproc-per-node=2", script(tmp_path, LINGER), folder) as job:
        wait_until(
            lambda: all((folder / rank).is_file() and (folder / rank).read_text() for rank in "01"), "workers run"
        )
        sessions = {int((folder / rank).read_text()) for rank in "01"}
        assert len(living(sessions)) == 4
        os.kill(job.pid, number)
        job.wait(60)
        wait_until(lambda: not living(sessions), "workers and their children are gone")
        if number == signal.SIGTERM:
            assert job.returncode == 1
            assert [event["signal"] for event in events(home, "node_stopped")] == ["SIGTERM"]


def test_two_jobs_on_a_host_never_meet(home: Path, tmp_path: Path) -> None:
    path = script(tmp_path, STEPS)
    jobs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        words = [f"--rdzv-id={name}", "--no-zygote", "--nproc-per-node=2", path, tmp_path / name, 5 + len(jobs)]
        jobs.append(started_job(home, *words))
    with jobs[0] as one, jobs[1] as two:
        assert (one.wait(120), two.wait(120)) == (0, 0)
    assert len({(tmp_path / name / "0").read_text() for name in "ab"}) == 2, "each has a store of its own"
    for name, steps in (("a", 5), ("b", 6)):
        status = json.loads(run_job(home, "status", name, "--json").stdout)["run"]
        assert (status["run_id"], status["state"], status["iteration"]) == (name, "finished", steps)
        assert len(status["nodes"]) == 1


def test_a_port_in_use_is_named(home: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        done = run_job(home, f"--master-port={port}", script(tmp_path, ""))
        assert done.returncode == 2
        assert f"--master-port: port {port} on this host is held" in done.stderr
        endpoint = f"localhost:{port}"
        done = run_job(home, "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", script(tmp_path, ""))
        assert done.returncode == 2
        assert f"--rdzv-endpoint {endpoint}" in done.stderr
