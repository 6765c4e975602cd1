"""The promises of config.py: one order of sources, and every error names its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini_run.config import OPTION_NAMES, DurableInterval, Settings, env_name, resolve
from gemini_run.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "gemini.yaml"
    file.write_text(text)
    return file


def test_defaults() -> None:
    assert resolve({}, {}, None) == Settings()
    assert Settings().memory_dir == Path("/dev/shm")


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "version: 1\nreplicas: 1\ndurable-keep: 5\nsnapshot_interval: 7\nzygote: off\n")
    environment = {"GEMINI_REPLICAS": "2", "GEMINI_SNAPSHOT_INTERVAL": "8"}
    settings = resolve({"replicas": 3}, environment, file)
    assert (settings.replicas, settings.snapshot_interval, settings.durable_keep) == (3, 8, 5)
    assert not settings.zygote
    assert settings.durable_timeout == Settings().durable_timeout


def test_every_option_can_come_from_each_source(tmp_path: Path) -> None:
    values = {
        "replicas": "2", "snapshot_interval": "3", "memory_dir": "/mnt/x", "durable": "s3://b/p",
        "durable_interval": "30s", "durable_keep": "4", "durable_timeout": "1.5", "require_checkpoint": "yes",
        "late_copy": "never", "shrink_after": "7", "overhead_budget": "2.5%",
        "failure_domain": "rack 1", "zygote": "false", "debug": "1",
    }  # fmt: skip
    assert set(values) == set(OPTION_NAMES)
    expected = Settings(
        replicas=2, snapshot_interval=3, memory_dir=Path("/mnt/x"), durable="s3://b/p",
        durable_interval=DurableInterval(seconds=30.0), durable_keep=4, durable_timeout=1.5, require_checkpoint=True,
        late_copy="never", shrink_after=7.0, overhead_budget=0.025, failure_domain="rack 1", zygote=False, debug=True,
    )  # fmt: skip
    assert resolve(values, {}, None) == expected
    assert resolve({}, {env_name(name): value for name, value in values.items()}, None) == expected
    file = write(tmp_path, "".join(f"{name}: {value}\n" for name, value in values.items()))
    assert resolve({}, {}, file) == expected


def test_what_was_not_given_does_not_count(tmp_path: Path) -> None:
    file = write(tmp_path, "snapshot_interval:\nreplicas: 2\n")
    settings = resolve({"replicas": None}, {}, file)
    assert (settings.snapshot_interval, settings.replicas) == (1, 2)
    assert resolve({}, {}, write(tmp_path, "")) == Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("colour: red", "unknown key 'colour'; known: replicas"),
        ("version: 2", "version 2; this release reads version 1"),
        ("- a", "expected keys and values, found a list"),
        ("a: b: c", "not YAML"),
        ("replicas: two", "key 'replicas': 'two' is not a valid value"),
        ("replicas: 2.7", "key 'replicas': 2.7 is not a valid value (give a whole number)"),
        ("replicas: true", "give a whole number"),
        ("durable_interval: 100", "key 'durable_interval': 100 is not a valid value (--durable-interval '100'"),
        ("durable_timeout: [1]", "key 'durable_timeout'"),
        ("zygote: perhaps", "give true or false"),
        ("memory_dir: 5", "key 'memory_dir'"),
    ],
)
def test_errors_of_the_file_name_it_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve({}, {}, file)
    assert str(file) in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        resolve({}, {}, tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"durable: \xe9\n")
    with pytest.raises(ConfigError, match="not YAML"):
        resolve({}, {}, tmp_path / "latin.yaml")


def test_errors_name_the_variable_or_the_flag() -> None:
    with pytest.raises(ConfigError, match="environment variable GEMINI_REPLICAS: 'x'"):
        resolve({}, {"GEMINI_REPLICAS": "x"}, None)
    with pytest.raises(ConfigError, match="environment variable GEMINI_DURABLE_INTERVAL: '5'"):
        resolve({}, {"GEMINI_DURABLE_INTERVAL": "5"}, None)
    with pytest.raises(ConfigError, match="--durable-keep: 'x'"):
        resolve({"durable_keep": "x"}, {}, None)


@pytest.mark.parametrize(
    "values",
    [{"replicas": 0}, {"snapshot_interval": 0}, {"durable_keep": 0}, {"durable_timeout": -1.0},
     {"durable_timeout": float("nan")}, {"shrink_after": -1.0}, {"late_copy": "soon"}, {"overhead_budget": 1.0}],
)  # fmt: skip
def test_values_out_of_range(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(values)).replace('_', '-')} "):
        Settings(**values)


def test_replicas_for_a_number_of_nodes() -> None:
    assert [Settings().replicas_for(n) for n in (1, 2, 8)] == [1, 2, 2]
    assert Settings(replicas=3).replicas_for(3) == 3
    with pytest.raises(ConfigError, match="--replicas 3 needs as many nodes, this job has 2: lower it to 2"):
        Settings(replicas=3).replicas_for(2)


@pytest.mark.parametrize(
    ("text", "iterations", "seconds"),
    [("100it", 100, None), (" 30s ", None, 30.0), ("10 m", None, 600.0), ("2h", None, 7200.0)],
)
def test_durable_interval(text: str, iterations: int | None, seconds: float | None) -> None:
    interval = DurableInterval.parse(text)
    assert (interval.iterations, interval.seconds) == (iterations, seconds)
    assert DurableInterval.parse(str(interval)) == interval


@pytest.mark.parametrize("text", ["", "0it", "0s", "10", "-1s", "1.5h", "1d"])
def test_no_durable_interval(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 100it"):
        DurableInterval.parse(text)


def test_durable_interval_is_exactly_one() -> None:
    for both in ({}, {"iterations": 1, "seconds": 1.0}):
        with pytest.raises(ConfigError, match="exactly one"):
            DurableInterval(**both)
