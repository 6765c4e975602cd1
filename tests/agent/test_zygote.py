"""Workers from the zygote are plain Python: own ``__main__``, streams, environment, random numbers; no orphans."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import living, wait_until

from gemini_run.agent.preimported import StartRequest
from gemini_run.agent.process import become_subreaper
from gemini_run.agent.zygote import WorkerStarter
from gemini_run.worker.bootstrap import worth_another_zygote

SCRIPT = """
import json, os, sys

def double(x):
    return 2 * x

if __name__ == "__main__":
    import random
    facts = {
        "argv": sys.argv,
        "path0": sys.path[0],
        "environ": dict(os.environ),
        "torch_ready": "torch" in sys.modules,
        "sid": os.getsid(0) == os.getpid(),
        "ppid": os.getppid(),
        "main_file": sys.modules["__main__"].__file__,
        "user_site": getattr(sys.modules.get("sitecustomize"), "MARK", None),
        "boot_on_path": [p for p in sys.path if p.endswith("boot")],
    }
    facts["loaded"] = sorted({"busy", "extra"} & set(sys.modules))
    mode = os.environ.get("ROLE_NAME")
    if mode == "random":
        import numpy, torch
        facts["random"] = [random.random(), float(numpy.random.rand()), float(torch.rand(())), torch.initial_seed()]
    elif mode == "child":
        import subprocess
        code = "import os, sys; e = os.environ; print('torch' in sys.modules, 'GEMINI_BOOT' in e, e.get('PYTHONPATH'))"
        facts["child"] = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    elif mode == "spawn":
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            facts["spawned"] = pool.submit(abs, -3).result(), pool.submit(double, 4).result()
    elif mode == "exit":
        sys.exit(7)
    elif mode == "raise":
        raise ValueError("on purpose")
    elif mode == "linger":
        import subprocess, time
        subprocess.Popen(["sleep", "1000"])
        print("lingering", flush=True)
        time.sleep(1000)
    print(json.dumps(facts))
if __name__ != "__main__":
    assert "torch" not in sys.modules
def double(x): return 2 * x
"""


class Bench:
    """A starter with one script, and what its workers say."""

    def __init__(
        self, folder: Path, *, use_zygote: bool, modules: tuple[str, ...] | None = None, num_workers: int = 1
    ) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(SCRIPT)
        self.args = (sys.executable, "-u", str(self.script), "--r=16", "a b")
        self.base = dict(os.environ)  # as the zygote is started with
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.imports = folder / "imports.json"
        if modules is not None:
            self.imports.write_text(json.dumps(modules))
        self.starter = WorkerStarter(
            self.args, num_workers=num_workers, use_zygote=use_zygote, imports=self.imports,
            on_event=lambda n, **f: self.events.append((n, f)),
        )  # fmt: skip

    def until(self, event: str) -> dict[str, Any]:
        """Let the starter prepare until it says `event`."""
        end = time.monotonic() + 60
        while event not in self.names():
            assert time.monotonic() < end, self.events
            self.starter.prepare()
            time.sleep(0.02)
        return next(fields for name, fields in self.events if name == event)

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def run(self, mode: str = "facts", *, code: int = 0, **env: str) -> dict[str, Any]:
        out, err = self.folder / "out", self.folder / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            request = StartRequest(self.args, {**self.base, "RANK": "0", "ROLE_NAME": mode, **env}, stdout, stderr)
            worker = self.starter.start(request)
            assert worker.wait(60) == code, err.read_text()
        self.starter.ended(worker)
        self.stderr = err.read_text()
        text = out.read_text()
        return json.loads(text) if text.startswith("{") else {}


@pytest.fixture(scope="module", params=["zygote", "cold"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    become_subreaper()
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import os\nMARK = 'user ' + os.environ.get('RANK', '')\n")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(folder / "site"))
    patch.setenv("OMP_NUM_THREADS", "1")
    bench = Bench(folder, use_zygote=request.param == "zygote")
    yield bench
    patch.undo()
    bench.starter.close()


def test_the_script_is_native(bench: Bench) -> None:
    facts = bench.run(TORCHELASTIC_RUN_ID="x")
    forked = "zygote_forked" in bench.names()
    assert forked == facts["torch_ready"]
    assert forked == ("zygote" in bench.folder.name), bench.events
    assert facts["argv"] == [str(bench.script), "--r=16", "a b"]
    assert facts["main_file"] == str(bench.script)
    assert facts["path0"] == str(bench.folder)
    assert facts["sid"]
    assert facts["ppid"] == os.getpid()
    assert facts["environ"]["TORCHELASTIC_RUN_ID"] == "x"


def test_nothing_of_the_hook_is_left(bench: Bench) -> None:
    facts = bench.run("child")
    assert facts["environ"]["PYTHONPATH"] == str(bench.folder / "site")
    assert not [name for name in facts["environ"] if name.startswith("GEMINI_BOOT")]
    assert facts["boot_on_path"] == []
    assert facts["child"] == f"False False {bench.folder / 'site'}"


def test_the_users_own_sitecustomize_runs_in_the_worker(bench: Bench) -> None:
    assert bench.run(RANK="5")["user_site"] == "user 5"


def test_spawned_children_find_main(bench: Bench) -> None:
    assert bench.run("spawn")["spawned"] == [3, 8]


def test_exit_code_and_exception_are_pythons(bench: Bench) -> None:
    bench.run("exit", code=7)
    error_file = bench.folder / "error.json"
    bench.run("raise", code=1, TORCHELASTIC_ERROR_FILE=str(error_file))
    assert "ValueError: on purpose" in bench.stderr
    assert "gemini_run" not in bench.stderr, "our frames show in the user's traceback"
    left = json.loads(error_file.read_text())
    assert left["message"]["message"] == "ValueError: on purpose"
    assert "on purpose" in left["message"]["extraInfo"]["py_callstack"]


def test_workers_draw_different_random_numbers(bench: Bench) -> None:
    one, two = bench.run("random")["random"], bench.run("random")["random"]
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_another_environment_starts_cold(bench: Bench) -> None:
    before = bench.names().count("zygote_forked")
    facts = bench.run(OMP_NUM_THREADS="2")
    assert facts["environ"]["OMP_NUM_THREADS"] == "2"
    assert not facts["torch_ready"]
    assert bench.names().count("zygote_forked") == before
    if "zygote" in bench.folder.name:
        assert "OMP_NUM_THREADS" in bench.events[-1][1]["reason"]


def test_an_agent_may_have_many_files_open(tmp_path: Path) -> None:
    """Beyond 1023 descriptors select() fails."""
    become_subreaper()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096) if hard > 0 else 4096, hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        bench = Bench(tmp_path, use_zygote=True)
        assert bench.run()["torch_ready"]
        bench.starter.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_dead_zygote_costs_speed_only(tmp_path: Path) -> None:
    become_subreaper()
    bench = Bench(tmp_path, use_zygote=True)
    zygote = bench.starter._zygote
    assert zygote is not None
    os.kill(zygote.pid, signal.SIGKILL)
    assert not bench.run()["torch_ready"]
    assert bench.names() == ["zygote_unfit"]
    bench.starter.close()


THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"


def test_what_the_script_was_seen_to_import_is_imported_by_the_next_zygote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_subreaper()
    (tmp_path / "extra.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = Bench(tmp_path, use_zygote=True)
    assert bench.run()["loaded"] == []
    bench.starter.prepare()
    assert bench.names() == ["zygote_ready", "zygote_forked"], "nothing to prepare"
    first = bench.starter._zygote
    bench.imports.write_text(json.dumps(["torch", "extra", "missing"]))
    bench.events.clear()
    assert bench.until("zygote_ready")["imported"] == 2
    bench.starter.prepare()
    assert bench.starter._next is None
    assert first is not None and not Path(f"/proc/{first.pid}").exists()
    assert bench.run()["loaded"] == ["extra"]
    assert bench.names().count("zygote_forked") == 1
    bench.starter.close()


def test_a_module_that_leaves_threads_is_left_out_of_the_zygote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_subreaper()
    (tmp_path / "busy.py").write_text(THREAD)
    (tmp_path / "extra.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = Bench(tmp_path, use_zygote=True)
    bench.run()
    bench.events.clear()
    bench.imports.write_text(json.dumps(["busy", "extra"]))
    unfit = bench.until("zygote_unfit")
    assert unfit["culprits"] == ("busy",) and "threads" in unfit["reason"]
    assert bench.run()["torch_ready"], "the first zygote serves meanwhile"
    assert bench.until("zygote_ready")["imported"] == 1
    assert bench.run()["loaded"] == ["extra"]
    bench.events.clear()
    bench.starter.prepare()
    assert bench.events == []
    bench.starter.close()


def test_where_nothing_can_be_forked_standbys_become_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a sitecustomize or a .pth file leaves a thread in every process."""
    become_subreaper()
    (tmp_path / "busy.py").write_text(THREAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = Bench(tmp_path, use_zygote=True, modules=("busy",), num_workers=2)
    first = bench.run()
    assert first["torch_ready"] and first["sid"] and first["ppid"] == os.getpid()
    assert bench.names() == ["zygote_ready", "standby_taken"]
    assert not bench.run()["torch_ready"], "none is left: it starts cold"
    bench.starter.prepare()
    assert len(bench.starter._standbys) == 2
    drawn = [bench.run("random") for _ in range(2)]
    assert all(facts["torch_ready"] for facts in drawn)
    assert all(a != b for a, b in zip(drawn[0]["random"], drawn[1]["random"], strict=True))
    bench.starter.prepare()
    bench.run("exit", code=7)
    assert bench.names().count("standby_taken") == 4
    standby = bench.starter._standbys[0]
    bench.starter.close()
    assert not Path(f"/proc/{standby.pid}").exists()


def test_a_device_that_is_open_after_the_imports_makes_for_cold_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No standby either: it would hold the device while others train on it."""
    become_subreaper()
    (tmp_path / "opens.py").write_text(
        "import os\nlink = os.readlink\n"
        "os.readlink = lambda path, **k: '/dev/nvidia0' if str(path).endswith('/fd/0') else link(path, **k)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = Bench(tmp_path, use_zygote=True, modules=("opens",))
    assert not bench.run()["torch_ready"]
    assert bench.names() == ["zygote_unfit"] and "/dev/nvidia0" in bench.events[0][1]["reason"]
    bench.starter.prepare()
    assert bench.starter._standbys == [] and bench.starter._zygote is None
    bench.starter.close()


HOLDER = """
import os, sys, time
from pathlib import Path
from gemini_run.agent.preimported import StartRequest
from gemini_run.agent.process import become_subreaper
from gemini_run.agent.zygote import WorkerStarter
become_subreaper()
args = (sys.executable, "-u", sys.argv[1], "x")
starter = WorkerStarter(
    args, num_workers=1, use_zygote=sys.argv[2] == "zygote", imports=Path("/nonexistent"), on_event=lambda *a, **k: None
)
worker = starter.start(StartRequest(args, {**os.environ, "ROLE_NAME": "linger"}, None, None))
print(worker.pid, starter._zygote.pid if starter._zygote else 0, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("way", ["zygote", "cold"])
def test_a_killed_agent_leaves_nothing(way: str, tmp_path: Path) -> None:
    script, holder = tmp_path / "script.py", tmp_path / "holder.py"
    script.write_text(textwrap.dedent(SCRIPT))
    holder.write_text(HOLDER)
    agent = subprocess.Popen([sys.executable, holder, script, way], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    said = [agent.stdout.readline(), agent.stdout.readline()]  # the worker's word may come first
    worker, zygote = (int(number) for number in next(line for line in said if "lingering" not in line).split())
    sessions = {worker, zygote} - {0}
    assert len(living(sessions)) == (3 if zygote else 2), "worker, its sleeping child, and the zygote"
    agent.kill()
    agent.wait()
    agent.stdout.close()
    wait_until(lambda: not living(sessions), "worker, grandchild and zygote are gone")


def test_a_few_modules_of_torch_are_not_worth_another_zygote() -> None:
    assert not worth_another_zygote([]) and not worth_another_zygote(["torch.utils.serialization", "torch.hub"])
    assert worth_another_zygote(["torch.hub", "sklearn"]) and worth_another_zygote([f"torch.m{i}" for i in range(30)])
