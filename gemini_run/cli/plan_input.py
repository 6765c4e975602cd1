"""What ``gemini-run plan`` is asked: options, the YAML file, defaults; and the job that they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gemini_run.cli.quantities import bandwidth, count, duration, rate, size, whole
from gemini_run.config import load_yaml
from gemini_run.errors import ConfigError
from gemini_run.plan.job import BYTES_PER_PARAMETER, Job

MOST_NODES = 100_000


@dataclasses.dataclass(frozen=True)
class Option:
    """One input. `attribute` of Job that it sets ("" where it takes more than that); `default` as text, None: none."""

    name: str
    attribute: str
    parse: Callable[[str], Any]
    default: str | None
    metavar: str
    help: str


OPTIONS = (
    Option("nodes", "num_nodes", whole, None, "N", "Nodes of the job."),
    Option("workers_per_node", "", whole, "8", "N", "Training processes on each."),
    Option("parameters", "", count, None, "COUNT", f"Of the model, {BYTES_PER_PARAMETER} bytes of state each: 100B."),
    Option("state_size", "", size, None, "SIZE", "Instead: one whole copy of the training state."),
    Option("shard_nodes", "shard_nodes", whole, None, "N",
           "Nodes that the state is sharded over; the others hold the same again. [default: all]"),
    Option("replicas", "replicas", whole, None, "M", "Copies of a shard, the local one included. [default: 2]"),
    Option("network", "network_bytes_per_s", bandwidth, "100Gbps", "BW", "Of a node, each direction."),
    Option("network_share", "network_share", rate, "0.5", "X", "Of the link's time, what training leaves free."),
    Option("storage", "storage_bytes_per_s", bandwidth, "20Gbps", "BW", "Of the durable tier, all nodes together."),
    Option("iteration", "iteration_s", duration, "60s", "TIME", "One iteration without checkpoints."),
    Option("failures", "failures_per_node_day", rate, "1.5%", "X", "Nodes lost, per node and day."),
    Option("process_failures", "process_failures_per_node_day", rate, "0", "X",
           "Failures that leave host memory, per node and day."),
    Option("domain_nodes", "domain_nodes", whole, None, "N", "Nodes in a failure domain (rack, switch)."),
    Option("domain_failures", "domain_failures_per_day", rate, "0", "X", "Whole domains lost, per domain and day."),
    Option("spares", "spares", whole, "0", "N", "Nodes that wait."),
    Option("replacement", "replacement_s", duration, "330s", "TIME", "Until a new node is there."),
    Option("detection", "detection_s", duration, "3s", "TIME", "Until a failure is seen."),
    Option("restart", "restart_s", duration, "60s", "TIME", "Until training runs again, without loading."),
    Option("durable_interval", "durable_interval_s", duration, None, "TIME",
           "Between durable checkpoints. [default: the best]"),
    Option("serialize", "serialize_bytes_per_s", bandwidth, "1GB/s", "BW",
           "Of a node that writes a durable checkpoint without gemini-run; training waits."),
    Option("durable_stall", "durable_stall_s", duration, None, "TIME",
           "What a durable checkpoint costs training with gemini-run. [default: its bytes on the node's link]"),
    Option("duration", "duration_s", duration, "7d", "TIME", "Of the training, for the row without checkpoints."),
    Option("host_memory", "", size, None, "SIZE", "Of a node, for copies; limits the recommendation."),
    Option("losses", "", whole, "6", "K", "Show the odds for 1..K nodes lost at once."),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}


@dataclasses.dataclass(frozen=True)
class Request:
    """A job, and what else was asked for.

    Attributes:
        assumed: names of the options that were left to their defaults.
    """

    job: Job
    workers_per_node: int
    host_memory_bytes: float | None
    losses: int
    assumed: tuple[str, ...]


def resolve(flags: Mapping[str, str | None], file: Path | None) -> Request:
    """Flag > file > default. Raises: ConfigError, naming the option or the file and its key."""
    given: dict[str, tuple[str, str]] = {}  # name -> (where from, text)
    if file is not None:
        given.update(_read(file))
    for name, text in flags.items():
        if text is not None:
            given[name] = (_flag(name), text)
            # A state given on the command line replaces the file's, whichever way that says it.
            other = {"parameters": "state_size", "state_size": "parameters"}.get(name)
            if other and flags.get(other) is None:
                given.pop(other, None)
    assumed = tuple(o.name for o in OPTIONS if o.name not in given and o.default is not None)
    values: dict[str, Any] = {}
    for option in OPTIONS:
        where, text = given.get(option.name, (_flag(option.name), option.default))
        if text is not None:
            try:
                values[option.name] = option.parse(text)
            except ValueError as error:
                raise ConfigError(f"{where} {text!r}: {error}") from error
    job = _job(values, {name: where for name, (where, _) in given.items()})
    for name in ("workers_per_node", "losses"):
        if values[name] < 1:
            raise ConfigError(f"{given[name][0]} {values[name]}: must be 1 or more")
    return Request(
        job, values["workers_per_node"], values.get("host_memory"), min(values["losses"], job.num_nodes), assumed
    )


def _job(values: Mapping[str, Any], where: Mapping[str, str]) -> Job:
    if "nodes" not in values:
        raise ConfigError("how many nodes? give --nodes N (or nodes: N in the file of --config)")
    if ("parameters" in values) == ("state_size" in values):
        how = "one of them, not both" if "parameters" in values else "one of them"
        raise ConfigError(f"how large is the state? give --parameters COUNT or --state-size SIZE, {how}")
    if values["nodes"] > MOST_NODES:
        raise ConfigError(f"{where['nodes']} {values['nodes']}: at most {MOST_NODES}")
    arguments = {o.attribute: values[o.name] for o in OPTIONS if o.attribute and o.name in values}
    arguments.setdefault("replicas", max(1, min(2, values["nodes"])))
    source = "parameters" if "parameters" in values else "state_size"
    arguments["state_bytes"] = values.get("state_size", values.get("parameters", 0.0) * BYTES_PER_PARAMETER)
    try:
        return Job(**arguments)
    except ValueError as error:
        attribute, _, problem = str(error).partition(": ")
        name = next((o.name for o in OPTIONS if o.attribute == attribute), source)
        for wrong, option in ((o.attribute, o.name) for o in OPTIONS if o.attribute):
            problem = problem.replace(wrong, _flag(option))
        raise ConfigError(f"{where.get(name, _flag(name))}: {problem}") from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read(file: Path) -> dict[str, tuple[str, str]]:
    content = load_yaml(file)
    if not isinstance(content or {}, dict):
        raise ConfigError(f"--config {file}: expected keys and values, found a {type(content).__name__}")
    read = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in BY_NAME:
            raise ConfigError(f"--config {file}: unknown key {key!r}; known: {', '.join(BY_NAME)}")
        if isinstance(value, (bool, dict, list)):
            raise ConfigError(f"--config {file}, key {key!r}: expected a number or text, found {value!r}")
        if value is not None:
            read[name] = (f"--config {file}, key {key!r}:", str(value))
    return read
