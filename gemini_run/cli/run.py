"""``gemini-run [options] train.py``: start a job. The options here are ours; the others are torchrun's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gemini_run.config import LATE_COPY

if TYPE_CHECKING:
    from gemini_run.agent.argv import CommandLine

_COMMAND_LINE = "gemini_run.command_line"  #: key in click's context: the words that are not ours


class RunCommand(click.Command):
    """Reads our options with click and leaves everything else, from the script on untouched, to torchrun's parser."""

    def own_options(self) -> Mapping[str, bool]:
        """Each of our option strings -> whether it takes a value."""
        return {
            string: not option.is_flag
            for option in self.params
            if isinstance(option, click.Option)
            for string in (*option.opts, *option.secondary_opts)
        }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from gemini_run.agent import signals

        signals.hold()  # before torch is imported: that takes seconds, in which they would end this process
        from gemini_run.agent.argv import split
        from gemini_run.agent.launch import torchrun_parser

        own = {**self.own_options(), "--help": False, "-h": False}
        command = split(args, own, torchrun_parser())
        ctx.meta[_COMMAND_LINE] = command
        return super().parse_args(ctx, list(command.gemini))

    def get_help(self, ctx: click.Context) -> str:
        from gemini_run.agent.launch import torchrun_parser

        theirs = torchrun_parser().format_help()
        _, _, options = theirs.partition("\n\n")
        return f"{super().get_help(ctx)}\n\nOptions of torchrun (all of the installed version work):\n\n{options}"


@click.command(
    cls=RunCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS] [TORCHRUN OPTIONS]",
)
@click.option(
    "--replicas",
    type=int,
    metavar="N",
    help="Copies of each shard, the local one included. [default: 2 where there are two nodes or more, else 1]",
)
@click.option(
    "--snapshot-interval", type=int, metavar="N", help="Iterations between snapshots into memory. [default: 1]"
)
@click.option(
    "--late-copy",
    type=click.Choice(LATE_COPY),
    help="Copy parameters and optimizer state beside the next forward and backward instead of at the boundary; "
    "auto: where they lie on GPUs. [default: auto]",
)
@click.option(
    "--overhead-budget",
    metavar="SHARE",
    help="How much of training's time replica traffic may cost, as 1% or 0.01. It goes into the network's idle spans; "
    "what does not fit makes the snapshot interval longer. 0: nothing outside idle spans. off: replicas are sent at "
    "once, every snapshot interval, whatever that costs. [default: 1%]",
)
@click.option("--memory-dir", metavar="DIR", help="The tmpfs that holds the snapshots. [default: /dev/shm]")
@click.option(
    "--durable",
    metavar="LOC",
    help="Durable tier: a directory on storage that survives the machines, or s3://bucket/prefix. [default: none]",
)
@click.option(
    "--durable-interval",
    metavar="100it|10m",
    help="How often a snapshot goes to the durable tier: iterations, or a time in s, m or h. [default: 3h]",
)
@click.option("--durable-keep", type=int, metavar="N", help="Checkpoints kept in the durable tier. [default: 2]")
@click.option(
    "--durable-timeout",
    type=float,
    metavar="SECONDS",
    help="Longest wait for the last upload when the run ends. [default: 300]",
)
@click.option(
    "--require-checkpoint",
    is_flag=True,
    default=None,
    help="Fail where no checkpoint is found, instead of starting from scratch.",
)
@click.option(
    "--shrink-after",
    type=float,
    metavar="SECONDS",
    help="With --nnodes MIN:MAX: how long a lost node may be replaced before the job goes on with fewer. [default: 10]",
)
@click.option(
    "--failure-domain",
    metavar="KEY",
    help="What this node fails together with (rack, switch, zone), any name: copies of a shard go to different ones. "
    "Each node says its own. [default: none]",
)
@click.option(
    "--no-zygote",
    is_flag=True,
    default=None,
    help="Start workers from scratch instead of forking them from a pre-imported process.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file with these options (replicas: 2, ...). Flags and GEMINI_* variables win over it.",
)
@click.option("--debug", is_flag=True, default=None, help="Tracebacks of gemini-run's own errors.")
@click.argument("script", required=False, metavar="SCRIPT [SCRIPT OPTIONS]...")
@click.pass_context
def run(ctx: click.Context, /, config: Path | None, no_zygote: bool | None, script: None, **flags: Any) -> None:
    """Start SCRIPT as torchrun does, and bring it back after failures.

    Options stand before the script. Nothing after it is looked at. Every option but --config can also be set as
    GEMINI_<NAME> in the environment or in the file that --config names.

    Signals to the launcher: SIGTERM, SIGINT, SIGHUP and SIGQUIT (--signals-to-handle) go to the workers and, after
    --shutdown-timeout, SIGKILL; the newest iteration in host memory is then stored in the durable tier (at most
    --durable-timeout; a second signal cuts that short) and the exit code is 1. SIGUSR1 and SIGUSR2 go to the workers
    that catch them and never end anything (Slurm's --signal=USR1@120); while a round forms they wait for its workers.
    """
    import os

    from gemini_run.agent.launch import launch
    from gemini_run.config import resolve

    command: CommandLine = ctx.meta[_COMMAND_LINE]
    given = {name: value for name, value in flags.items() if value is not None}
    if no_zygote:
        given["zygote"] = False
    settings = resolve(given, os.environ, config)
    ctx.obj["debug"] = settings.debug
    launch(command, settings, ctx.obj["subcommands"])
