"""``gemini-run plan``: from the command line to what is printed, written and refused."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemini_run.cli.main import main
from gemini_run.cli.plan_input import OPTIONS, resolve
from gemini_run.cli.quantities import bandwidth, count, duration, rate, show_share, show_time, size, whole
from gemini_run.errors import ConfigError

SMALL = ["--nodes", "4", "--state-size", "80GB"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 0, capsys.readouterr().err
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(run(capsys, *words, "--json"))
    return read


# --- what it says --------------------------------------------------------------------------------------


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--nodes", "16", "--parameters", "100B", "--network", "400Gbps", "--iteration", "62s")
    assert found["version"] == 1
    assert found["input"]["state_bytes"] == 1.2e12 and found["input"]["network_bytes_per_s"] == 5e10
    assert [row["lost"] for row in found["recovery"]] == [1, 2, 3, 4, 5, 6]
    assert found["recovery"][1]["probability"] == pytest.approx(14 / 15)
    assert found["recovery"][3]["bound"] == pytest.approx(0.6)
    assert found["recovery"][1]["with_replicas"] == {"1": 0, "2": pytest.approx(14 / 15), "3": 1, "4": 1}
    assert found["memory"] == {"replicas_bytes": 300e9, "held_bytes": 75e9, "worker_bytes": 75e9 / 8}
    assert found["traffic"]["interval_iterations"] == 1
    assert [row["policy"] for row in found["policies"]] == ["none", "durable", "gemini"]
    assert found["policies"][0]["goodput"] < found["policies"][1]["goodput"] < found["policies"][2]["goodput"]
    assert found["advice"]["replicas"] == 2 and found["advice"]["reason"]
    assert found["domains"] == [] and found["placement"]["unavoided"] == []
    assert "failures" in found["input"]["assumed"] and "network" not in found["input"]["assumed"]


def test_tables_say_what_the_document_has(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--nodes", "16", "--parameters", "100B", "--iteration", "62s")
    assert "16 nodes x 8 workers, state of 1.2 TB" in out
    assert "93.3%" in out and "61.5%" in out
    assert "host memory per node: 300 GB" in out
    assert "recommended: --replicas 2" in out and "durable interval: 3 h" in out
    assert "network 100Gbps" in out  # assumed
    for policy in ("none", "durable only", "GEMINI"):
        assert f"\n{policy}" in out


def test_domains(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "8", "--state-size", "1TB", "--domain-nodes", "4"]
    assert document(capsys, *words)["domains"] == [{"lost": 1, "probability": 1}, {"lost": 2, "probability": 0}]
    assert "not avoided" not in run(capsys, *words)
    out = run(capsys, "--nodes", "8", "--state-size", "1TB", "--domain-nodes", "5")
    assert "not avoided: 2 of 8 nodes" in out and "1 domain" in out


def test_more_replicas_than_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--nodes", "12", "--state-size", "1TB", "--replicas", "6", "--losses", "12")
    assert found["recovery"][4]["probability"] == 1 and found["recovery"][11]["probability"] == 0
    assert "m=6" in run(capsys, "--nodes", "12", "--state-size", "1TB", "--replicas", "6")


def test_one_node(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--nodes", "1", "--state-size", "1GB")
    assert found["input"]["replicas"] == 1 and found["advice"]["replicas"] == 1
    assert found["recovery"] == [{"lost": 1, "probability": 0, "with_replicas": {"1": 0}, "bound": 0}]


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--host-memory", "10GB")
    assert document(capsys, *words)["advice"]["replicas"] is None
    assert "not even one copy fits" in run(capsys, *words)


# --- the file ------------------------------------------------------------------------------------------


def test_flag_before_file_before_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 8\nparameters: 7e9\nnetwork: 200Gbps\nspares: 1\ndomain-nodes: 4\niteration:\n")
    found = document(capsys, "--config", str(file), "--spares", "3")["input"]
    assert (found["num_nodes"], found["state_bytes"], found["spares"]) == (8, 84e9, 3)
    assert (found["network_bytes_per_s"], found["domain_nodes"], found["iteration_s"]) == (25e9, 4, 60)


def test_a_state_size_given_replaces_the_files_parameters(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 8\nparameters: 7B\n")
    assert resolve({"state_size": "1TB"}, file).job.state_bytes == 1e12


# --- the picture ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "begins"), [("odds.png", b"\x89PNG"), ("odds.svg", b"<?xml")])
def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, *SMALL, "--domain-nodes", "2", "--plot", str(tmp_path / name))
    content = (tmp_path / name).read_bytes()
    assert content.startswith(begins) and len(content) > 10_000


def test_without_matplotlib(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    line = refused(capfd, *SMALL, "--plot", str(tmp_path / "odds.png"))
    assert "pip install 'gemini-run[plot]'" in line and not (tmp_path / "odds.png").exists()


# --- what is refused -----------------------------------------------------------------------------------


def refused(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    captured = capfd.readouterr()
    assert end.value.code == 2, captured.err
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("gemini-run: error: "), captured.err
    assert captured.out == ""
    return lines[0]


@pytest.mark.parametrize(("words", "said"), [
    ([], "--nodes N"),
    (["--nodes", "4"], "--parameters COUNT or --state-size SIZE"),
    (["--nodes", "4", "--parameters", "7B", "--state-size", "1TB"], "not both"),
    (["--nodes", "four", "--parameters", "7B"], "--nodes 'four': give a whole number"),
    (["--nodes", "0", "--parameters", "7B"], "--nodes: 0, must be 1 or more"),
    (["--nodes", "200000", "--parameters", "7B"], "at most 100000"),
    ([*SMALL, "--replicas", "5"], "--replicas: 5, must be from 1 up to the 4 node(s)"),
    ([*SMALL, "--network", "400"], "--network '400': give a bandwidth such as 400Gbps (bits) or 50GB/s (bytes)"),
    ([*SMALL, "--network", "50GBps"], "(bits)"),
    ([*SMALL, "--network-share", "2"], "--network-share: 2, must be at most 1"),
    ([*SMALL, "--iteration", "0s"], "--iteration: 0, must be more than 0"),
    ([*SMALL, "--failures", "-1"], "--failures '-1'"),
    ([*SMALL, "--failures", "often"], "--failures 'often'"),
    ([*SMALL, "--shard-nodes", "3"], "--shard-nodes: 3 does not divide the 4 nodes"),
    ([*SMALL, "--domain-failures", "1"], "--domain-failures: needs --domain-nodes"),
    ([*SMALL, "--losses", "0"], "--losses 0: must be 1 or more"),
    ([*SMALL, "--workers-per-node", "0"], "--workers-per-node 0"),
    ([*SMALL, "--state-size", "0GB"], "--state-size: 0, must be more than 0"),
    (["--nodes", "4", "--parameters", "0"], "--parameters: 0, must be more than 0"),
    ([*SMALL, "--plot", "odds.pdf"], "must end in .png or .svg"),
    ([*SMALL, "--plot", "/no/such/place/odds.png"], "no directory /no/such/place"),
    ([*SMALL, "--config", "/no/such/file"], "--config /no/such/file: No such file"),
    (["--reproduce", "--nodes", "4"], "leave out --nodes"),
    ([*SMALL, "--no-such"], "--no-such"),
    (["--reproduce", "--trials", "1"], "--trials"),
])  # fmt: skip
def test_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refused(capfd, *words)


@pytest.mark.parametrize(("text", "said"), [
    ("nodes: 4\nnoodles: 3\n", "unknown key 'noodles'; known: nodes,"),
    ("nodes: 4\nstate_size: big\n", "key 'state_size': 'big': give a size"),
    ("nodes: 4\nstate_size: 1TB\nreplicas: 9\n", "key 'replicas'"),
    ("nodes: [4]\n", "key 'nodes': expected a number or text"),
    ("- 4\n", "found a list"),
    ("a: b: c\n", "not YAML"),
])  # fmt: skip
def test_a_faulty_file(capfd: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    line = refused(capfd, "--config", str(file))
    assert said in line and str(file) in line


# --- quantities ----------------------------------------------------------------------------------------


def test_quantities() -> None:
    assert (size("80GB"), size("1.5 TiB"), size("12B")) == (80e9, 1.5 * 2**40, 12)
    assert (bandwidth("400Gbps"), bandwidth("400Gbit/s"), bandwidth("50GB/s"), bandwidth("1GiB/s")) == (
        50e9, 50e9, 50e9, 2**30,
    )  # fmt: skip
    assert (duration("300ms"), duration("62"), duration("5m"), duration("3h"), duration("2d")) == (
        pytest.approx(0.3), 62, 300, 10800, 172800,
    )  # fmt: skip
    assert (count("100B"), count("350M"), count("7e9"), rate("1.5%"), rate("0.5")) == (1e11, 350e6, 7e9, 0.015, 0.5)
    assert whole(" 12 ") == 12


@pytest.mark.parametrize(("parse", "text"), [
    (size, "80G"), (size, "12"), (size, "GB"), (size, "-1GB"),
    (bandwidth, "400"), (bandwidth, "50GBps"), (duration, "5x"),
    (duration, "nan"), (count, "1e"), (rate, "1/d"), (whole, "2.7"), (whole, ""),
])  # fmt: skip
def test_what_is_no_quantity(parse: Any, text: str) -> None:
    with pytest.raises(ValueError, match="give a"):
        parse(text)


def test_shares_are_told_from_0_and_1() -> None:
    assert [show_share(v) for v in (0, 1, 0.933, 0.9999, 0.9999999, 0.0001)] == [
        "0%", "100%", "93.3%", "99.99%", "99.99999%", "0.01%",
    ]  # fmt: skip
    assert [show_time(v) for v in (None, 0, 0.25, 62, 10800, 1e9)] == [
        "-",
        "0 s",
        "250 ms",
        "1.03 min",
        "3 h",
        "31.7 years",
    ]


# --- the surface ---------------------------------------------------------------------------------------


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--help")
    for option in OPTIONS:
        assert f"--{option.name.replace('_', '-')}" in out
    for word in ("--config", "--json", "--plot", "--reproduce", "--seed", "--trials"):
        assert word in out


def test_defaults_parse() -> None:
    request = resolve({"nodes": "2", "state_size": "1GB"}, None)
    assert set(request.assumed) == {option.name for option in OPTIONS if option.default is not None}
    with pytest.raises(ConfigError):
        resolve({}, None)


def test_reproduce(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--reproduce", "--trials", "500", "--seed", "5")
    rows = {row["what"]: row for row in found["figures"]}
    assert rows["recovery, N=16 m=2, 2 nodes lost"]["ours"] == pytest.approx(93.333, abs=1e-3)
    assert rows["iteration time, blocking"]["ours"] is None
    assert all(check["agrees"] for check in found["checks"]) and len(found["checks"]) > 10
    assert (found["seed"], found["trials"]) == (5, 500)
    out = run(capsys, "--reproduce", "--trials", "500")
    assert "measurements of their cluster" in out and "racks known" in out and "differs" in out


def test_neither_torch_nor_matplotlib_is_imported_for_a_table() -> None:
    code = (
        "import sys\nfrom gemini_run.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "    assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "plan", *SMALL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
