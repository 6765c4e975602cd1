"""Settings: frozen sections, resolved once: flag > environment > YAML file > default."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gemini_run.errors import ConfigError
from gemini_run.wire import DEFAULT_MEMORY_BASE

CONFIG_VERSION = 1
LATE_COPY = ("auto", "always", "never")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DurableInterval:
    """How often a checkpoint goes to the durable tier: by iterations or by time, exactly one."""

    iterations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.iterations is None) == (self.seconds is None):
            raise ConfigError("durable interval: give iterations or seconds, exactly one")

    _FORM = re.compile(r"(\d+)\s*(it|s|m|h)")

    @classmethod
    def parse(cls, text: str) -> DurableInterval:
        """``100it``, ``30s``, ``10m`` or ``2h``. Raises: ConfigError."""
        match = cls._FORM.fullmatch(text.strip())
        if not match or int(match[1]) == 0:
            raise ConfigError(
                f"--durable-interval {text!r}: give a count of iterations such as 100it, or a time such as "
                "30s, 10m or 3h"
            )
        count, unit = int(match[1]), match[2]
        if unit == "it":
            return cls(iterations=count)
        return cls(seconds=count * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit])

    def __str__(self) -> str:
        return f"{self.iterations}it" if self.iterations else f"{self.seconds:g}s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All of gemini-run's own options (torchrun's stay torchrun's).

    Attributes:
        replicas: copies of each shard including the local one; None = 2 where there are two nodes, else 1.
        snapshot_interval: iterations between snapshots into memory.
        late_copy: when the state is copied: "always" late, beside the next forward and backward, "never", or "auto":
            late where it lies on devices.
        memory_dir: the tmpfs that holds the slots.
        overhead_budget: share of training's time that replica traffic may cost; 0 = none, only idle spans are used;
            None = no limit, replicas are sent at once.
        durable: directory or ``s3://bucket/prefix``, None = no durable tier.
        durable_interval: how often to persist.
        durable_keep: committed checkpoints kept in the durable tier.
        durable_timeout: seconds to wait at the end of a run for the last upload.
        require_checkpoint: fail where no checkpoint is found.
        shrink_after: seconds that a job of ``--nnodes MIN:MAX`` waits for a lost node's replacement before it goes on
            with fewer.
        failure_domain: what this node fails together with (a rack, a switch, a zone), by name; None = nothing.
        zygote: fork workers from a pre-imported process.
        debug: tracebacks of gemini-run's own errors.
    """

    replicas: int | None = None
    snapshot_interval: int = 1
    late_copy: str = "auto"
    memory_dir: Path = DEFAULT_MEMORY_BASE
    overhead_budget: float | None = 0.01
    durable: str | None = None
    durable_interval: DurableInterval = DurableInterval(seconds=3 * 3600.0)
    durable_keep: int = 2
    durable_timeout: float = 300.0
    require_checkpoint: bool = False
    shrink_after: float = 10.0
    failure_domain: str | None = None
    zygote: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        if self.replicas is not None and self.replicas < 1:
            raise ConfigError(f"--replicas {self.replicas}: at least 1 (the local copy)")
        if self.snapshot_interval < 1:
            raise ConfigError(f"--snapshot-interval {self.snapshot_interval}: at least 1 iteration")
        if self.late_copy not in LATE_COPY:
            raise ConfigError(f"--late-copy {self.late_copy}: one of {', '.join(LATE_COPY)}")
        if self.overhead_budget is not None and not 0 <= self.overhead_budget < 1:
            raise ConfigError(f"--overhead-budget {self.overhead_budget:.4g}: 0% to less than 100%, or off")
        if self.durable_keep < 1:
            raise ConfigError(f"--durable-keep {self.durable_keep}: at least 1")
        if not self.durable_timeout >= 0:  # NaN is neither
            raise ConfigError(f"--durable-timeout {self.durable_timeout:g}: seconds, 0 or more")

        if not self.shrink_after >= 0:
            raise ConfigError(f"--shrink-after {self.shrink_after:g}: seconds, 0 or more")

    def copies_among(self, num_nodes: int) -> int:
        """m for a round of `num_nodes` nodes: fewer than asked for where the job has shrunk below that."""
        return min(self.replicas or 2, num_nodes)

    def replicas_for(self, num_nodes: int) -> int:
        """m for a job of at most `num_nodes` nodes. Raises: ConfigError where more copies than nodes are asked."""
        if self.replicas is None:
            return min(2, num_nodes)
        if self.replicas > num_nodes:
            raise ConfigError(
                f"--replicas {self.replicas} needs as many nodes, this job has {num_nodes}: lower it to "
                f"{num_nodes} or add nodes"
            )
        return self.replicas


#: option name (as in flags, YAML keys and, upper-cased with GEMINI_, variables) -> conversion
_CONVERT: Mapping[str, Any] = {
    "replicas": lambda v: _integer(v),
    "snapshot_interval": lambda v: _integer(v),
    "late_copy": str,
    "memory_dir": Path,
    "overhead_budget": lambda v: _share(v),
    "durable": str,
    "durable_interval": lambda v: DurableInterval.parse(str(v)),
    "durable_keep": lambda v: _integer(v),
    "durable_timeout": lambda v: _number(v),
    "require_checkpoint": lambda v: _boolean(v),
    "shrink_after": lambda v: _number(v),
    "failure_domain": str,
    "zygote": lambda v: _boolean(v),
    "debug": lambda v: _boolean(v),
}
OPTION_NAMES = tuple(_CONVERT)


def env_name(option: str) -> str:
    return f"GEMINI_{option.upper()}"


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> Settings:
    """Merge the four sources. `flags` holds what was given on the command line (None: not given).

    Raises:
        ConfigError: an unknown key, an unreadable file, or a value that does not convert; names its source.
    """
    values: dict[str, Any] = {}
    if file is not None:
        for key, value in _read_file(file).items():
            name = str(key).replace("-", "_")
            if name == "version":
                if value != CONFIG_VERSION:
                    raise ConfigError(f"{file}: version {value}; this release reads version {CONFIG_VERSION}")
                continue
            if name not in _CONVERT:
                raise ConfigError(f"{file}: unknown key {key!r}; known: {', '.join(OPTION_NAMES)}")
            if value is not None:  # a key without a value: the default
                values[name] = _convert(name, value, f"{file}, key {key!r}")
    for name in OPTION_NAMES:
        if (text := environment.get(env_name(name))) is not None:
            values[name] = _convert(name, text, f"environment variable {env_name(name)}")
    for name, value in flags.items():
        if value is not None:
            values[name] = _convert(name, value, f"--{name.replace('_', '-')}")
    return Settings(**values)


def _convert(name: str, value: Any, source: str) -> Any:
    try:
        return _CONVERT[name](value)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {value!r} is not a valid value ({error})") from error


def _integer(value: Any) -> int:
    if isinstance(value, (bool, float)):  # int() would cut 2.7 down to 2 without a word
        raise ValueError("give a whole number")
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("give a number")
    return float(value)


def _share(value: Any) -> float | None:
    text = str(value).strip().lower()
    if text == "off" or value is False:  # YAML reads a bare `off` as false
        return None
    if value is True or not text:
        raise ValueError("give a percentage such as 1%, or off")
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("give true or false")


def load_yaml(file: Path) -> Any:
    """What ``--config`` names. Raises: ConfigError."""
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not YAML: {' '.join(str(error).split())}") from error


def _read_file(file: Path) -> dict[str, Any]:
    content = load_yaml(file)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file}: expected keys and values, found a {type(content).__name__}")
    return content
