"""The same small scripts under torchrun and under gemini-run: what they see, what they leave, how it ends.

Whatever differs is listed here, and in the README as an improvement.
"""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jobs import GEMINI_RUN, PATIENCE, TORCHRUN, environment

pytestmark = pytest.mark.cluster

SHOW = """
import json, os, signal, sys
main = sys.modules["__main__"]
out, rank = os.environ["OUT"], os.environ["RANK"]
spec = getattr(main, "__spec__", None)
with open(os.path.join(out, rank + ".json"), "w") as file:
    json.dump({
        "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path, "flags": list(sys.flags), "env": dict(os.environ),
        "main": sorted(vars(main)), "name": __name__, "file": __file__, "spec": spec and spec.name,
        "package": __package__, "loader": type(main.__loader__).__name__, "executable": sys.executable,
        "umask": os.umask(0o22), "stdin": os.isatty(0), "buffered": sys.stdout.line_buffering,
        "signals": [str(signal.getsignal(n)) for n in (1, 2, 10, 12, 15)],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "modules": sorted(m for m in sys.modules if m.partition(".")[0] in ("torch", "numpy", "gemini_run")),
    }, file)
print("out", rank)
print("err", rank, file=sys.stderr)
if os.environ.get("FAIL") == rank:
    raise ValueError("on purpose")
"""

#: what gemini-run adds for its own use
ADDED = re.compile(r"GEMINI_")
#: named anew by each launcher, or each run
OF_THE_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OUT", "TORCHELASTIC_MAX_RESTARTS"}


class Ran:
    """One launcher on one command line."""

    def __init__(self, folder: Path, launcher: list[str], words: list[str], env: dict[str, str]) -> None:
        self.out = folder / "out"
        self.logs = folder / "logs"
        self.error_file = folder / "error.json"
        self.out.mkdir(parents=True)
        environ = environment(folder / "home", **env, OUT=str(self.out))
        del environ["OMP_NUM_THREADS"]  # its rule is one of the things compared
        environ.update(env)
        words = [word.replace("LOGS", str(self.logs)) for word in words]
        if "--error-file" in words:
            words.remove("--error-file")
            environ["TORCHELASTIC_ERROR_FILE"] = str(self.error_file)
        self.done = subprocess.run(
            [*launcher, *words], env=environ, cwd=folder.parent, capture_output=True, text=True, timeout=PATIENCE
        )

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]

    def log_files(self) -> dict[str, str]:
        """Path below the log folder, the run's own name taken out -> text."""
        files = {}
        for path in sorted(self.logs.rglob("*")):
            if path.is_file():
                run, _, rest = str(path.relative_to(self.logs)).partition("/")
                files[re.sub(r"_\w+$", "_RANDOM", run) + "/" + rest] = path.read_text()
        return files


@pytest.fixture
def both(tmp_path: Path) -> Any:
    """Call it with words and environment: (torchrun's, gemini-run's), which ran side by side."""
    (tmp_path / "show.py").write_text(SHOW)
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "mod.py").write_text(SHOW)

    def run(*words: object, ours: tuple[str, ...] = ("--no-zygote",), **env: str) -> tuple[Ran, Ran]:
        spoken = [str(word) for word in words]
        jobs = [("torchrun", TORCHRUN, spoken), ("gemini", GEMINI_RUN, [*ours, *spoken])]
        with ThreadPoolExecutor(2) as pool:
            theirs, mine = pool.map(lambda job: Ran(tmp_path / job[0], job[1], job[2], env), jobs)
        assert mine.done.returncode == theirs.done.returncode, mine.done.stderr
        return theirs, mine

    return run


def compare_seen(theirs: Ran, mine: Ran, *, zygote: bool = False) -> None:
    assert len(theirs.seen) == len(mine.seen) > 0
    for one, two in zip(theirs.seen, mine.seen, strict=True):
        env, other = (
            {k: v for k, v in seen.pop("env").items() if not ADDED.match(k) and k not in OF_THE_RUN}
            for seen in (one, two)
        )
        if zygote:  # as in any process that has imported what the first optimizer step imports
            for seen in (env, other):  # the tests' own process may have it as well
                seen.pop("TORCHINDUCTOR_CACHE_DIR", None)
        assert env == other
        assert not one.pop("modules")
        assert ("torch" in (found := two.pop("modules"))) is zygote and "gemini_run" in found
        # An exception is to reach the error file without @record.
        assert two.pop("hooks") == [False, True] and one.pop("hooks") == [True, True]
        assert one == two


@pytest.mark.parametrize("ours", [("--no-zygote",), ()], ids=["cold", "zygote"])
def test_what_a_script_sees(both: Any, tmp_path: Path, ours: tuple[str, ...]) -> None:
    words = ["--standalone", "--nproc-per-node=2", "--role=trainer", tmp_path / "show.py", "--role=x", "a b", "--"]
    theirs, mine = both(*words, ours=ours)
    assert mine.seen[0]["env"]["OMP_NUM_THREADS"] == "1" and mine.seen[1]["env"]["ROLE_NAME"] == "trainer"
    compare_seen(theirs, mine, zygote=not ours)
    assert sorted(theirs.done.stdout) == sorted(mine.done.stdout), "in whatever order two processes wrote it"


def test_a_module_of_a_package_and_one_process(both: Any) -> None:
    theirs, mine = both("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=x", "-m", "pack.mod", "--x")
    assert "OMP_NUM_THREADS" not in mine.seen[0]["env"], "one process on a node may use all cores"
    assert mine.seen[0]["env"]["TORCHELASTIC_RUN_ID"] == theirs.seen[0]["env"]["TORCHELASTIC_RUN_ID"] == "x"
    compare_seen(theirs, mine)


def test_settings_from_the_environment_and_a_static_rendezvous(both: Any, tmp_path: Path) -> None:
    env = {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "3", "PET_ROLE": "worker", "OMP_NUM_THREADS": "3"}
    theirs, mine = both("--master-addr=127.0.0.1", "--master-port=0", tmp_path / "show.py", **env)
    assert [seen["env"]["TORCHELASTIC_MAX_RESTARTS"] for seen in mine.seen + theirs.seen] == ["3"] * 4
    assert mine.seen[0]["env"]["OMP_NUM_THREADS"] == "3" and mine.seen[0]["env"]["ROLE_NAME"] == "worker"
    compare_seen(theirs, mine)


def test_log_files_and_prefixes(both: Any, tmp_path: Path) -> None:
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job7", "--nproc-per-node=2"]
    words += ["--role=trainer", "--redirects=3", "--tee=0:3"]
    theirs, mine = both(*words, "--log-dir=LOGS", "--local-ranks-filter=0", tmp_path / "show.py")
    assert mine.log_files() == theirs.log_files()
    assert any(name.endswith("attempt_0/1/stdout.log") for name in mine.log_files())
    assert mine.done.stdout == theirs.done.stdout and "[trainer0]:out 0" in mine.done.stdout
    prefixed = [
        [line for line in ran.done.stderr.splitlines() if line.startswith("[trainer")] for ran in (theirs, mine)
    ]
    assert prefixed[0] == prefixed[1] != []


def test_an_exception(both: Any, tmp_path: Path) -> None:
    words = ["--error-file", "--standalone", "--nproc-per-node=2", "--max-restarts=0", tmp_path / "show.py"]
    theirs, mine = both(*words, FAIL="1")
    assert mine.done.returncode == 1
    traces = [re.findall(r"^(?:Traceback|  File \"[^\"]*show.py\".*|ValueError.*)", ran.done.stderr, re.M)
              for ran in (theirs, mine)]  # fmt: skip
    assert traces[0][:3] == traces[1][:3] != []
    assert "gemini_run" not in mine.done.stderr.split("ValueError")[0], "no frame of the launcher's above the script's"
    assert not theirs.error_file.exists(), "torchrun leaves none unless the script uses @record"
    found = json.loads(mine.error_file.read_text())["message"]
    assert found["message"] == "ValueError: on purpose" and "show.py" in found["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("option", ["--nproc-per-node=auto", "--nproc-per-nod=cpu"])
def test_a_number_of_processes_by_name_and_an_abbreviated_option(both: Any, tmp_path: Path, option: str) -> None:
    theirs, mine = both("--standalone", option, tmp_path / "show.py")
    assert len(mine.seen) == len(theirs.seen) > 0


def test_a_program_that_is_not_python(both: Any) -> None:
    words = ["--standalone", "--no-python", "sh", "-c", 'echo "$RANK $0 $@" > $OUT/said', "x", "y z"]
    assert [(ran.out / "said").read_text() for ran in both(*words)] == ["0 x y z\n"] * 2


def test_a_wrong_option_ends_with_code_2(both: Any, tmp_path: Path) -> None:
    _, mine = both("--no-such-option", tmp_path / "show.py")
    assert mine.done.returncode == 2 and len(mine.done.stderr.strip().splitlines()) == 1
