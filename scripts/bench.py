"""What gemini-run costs while training goes well, and what it saves when a worker dies, beside what else there is.

    python scripts/bench.py [--part a|b|c|all] [--quick] [--json FILE]

(a) Every iteration is checkpointed: stall of the call, and slowdown of training by the calls and all that runs behind
    them, against torch.save, DCP save and DCP async_save to /dev/shm; once with both workers on one node, once on two
    nodes that hold each other's replicas.
(b) SIGKILL of a worker: time to the first finished step and to the first new one, the same for a second worker right
    after ("again"), iterations lost, against torchrun with torch.save every 50 iterations.
(c) How fast a killed worker's state comes back from its node's memory, against copying the same bytes.

All contenders of a part train the same model. Run it on an otherwise idle machine; the header names the load.
Exit code 1 if gemini-run itself failed in any part; another contender that fails is shown as failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench_recovery import CONTENDERS as RECOVERY_CONTENDERS
from bench_recovery import OURS as RECOVERY_OURS
from bench_recovery import RecoverySettings, run_recovery
from bench_restore import RestoreSettings, run_restore
from bench_stall import CONTENDERS as STALL_CONTENDERS
from bench_stall import FLOOR, NOTHING, StallSettings, run_stall
from bench_stall import OURS as STALL_OURS
from rich.console import Console
from rich.table import Table

from gemini_run.config import LATE_COPY

MODELS = {"ddp": "DDP", "fsdp2": "FSDP2"}
ROOT = Path(__file__).resolve().parent.parent
JSON_VERSION = 1
#: option -> (full, quick)
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "state_mb": (300.0, 20.0),
    "rounds": (6, 2),
    "block": (5, 3),
    "kills": (3, 1),
    "restore_mb": (1000.0, 50.0),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("a", "b", "c", "all"), default="all")
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--seed", type=int, default=0, help="of the order of blocks and the moments of kills")
    stall = parser.add_argument_group("part a")
    stall.add_argument("--model", choices=tuple(MODELS), default="ddp", help="how the state lies on the ranks (ddp)")
    stall.add_argument("--state-mb", type=float, help="parameters and both moments, of each rank (300; quick 20)")
    stall.add_argument("--batch", type=int, default=64)
    stall.add_argument("--rounds", type=int, help="blocks of each contender (6; quick 2)")
    stall.add_argument("--block", type=int, help="iterations in a block (5; quick 3)")
    stall.add_argument("--late-copy", choices=LATE_COPY, default="auto", help="of gemini-run (auto: not late on CPUs)")
    stall.add_argument("--nodes", type=int, choices=(1, 2), help="only on one or two nodes (default: both, in turn)")
    stall.add_argument(
        "--contenders", type=_names(STALL_CONTENDERS), default=STALL_CONTENDERS, metavar="NAME,...",
        help=f"of: {', '.join(STALL_CONTENDERS)} (default: all; {NOTHING} is always among them)",
    )  # fmt: skip
    stall.add_argument("--timeout", type=float, default=900.0, help="seconds for one run of part a")
    recovery = parser.add_argument_group("part b")
    recovery.add_argument("--kills", type=int, help="of each contender (3; quick 1)")
    recovery.add_argument("--save-every", type=int, default=50, help="iterations between the torch.saves")
    recovery.add_argument("--recovery-batch", type=int, default=256, help="sets the length of an iteration")
    recovery.add_argument(
        "--launchers", type=_names(RECOVERY_CONTENDERS), default=RECOVERY_CONTENDERS, metavar="NAME,...",
        help=f"of: {', '.join(RECOVERY_CONTENDERS)} (default: all)",
    )  # fmt: skip
    restore = parser.add_argument_group("part c")
    restore.add_argument("--restore-mb", type=float, help="state of each rank (1000; quick 50)")
    args = parser.parse_args(arguments)
    for name, (full, quick) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    return args


def _names(known: tuple[str, ...]) -> Any:
    def convert(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names

    return convert


def header() -> dict[str, Any]:
    """Where and of what these numbers are."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "machine": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        "kernel": platform.release(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "load_average": os.getloadavg(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "not in a git work tree"


# --- tables ----------------------------------------------------------------------------------------


def show_header(console: Console, facts: dict[str, Any]) -> None:
    load = " ".join(f"{value:.2f}" for value in facts["load_average"])
    console.print(f"$ {facts['command']}", markup=False, highlight=False)
    console.print(
        f"{facts['machine']}, {facts['cores']} cores, {facts['memory_gb']:.0f} GB, Linux {facts['kernel']}; "
        f"torch {facts['torch']}, Python {facts['python']}; commit {facts['commit']}; load average {load}",
        highlight=False,
    )


def show_stall(console: Console, result: dict[str, Any]) -> None:
    nodes = result["nodes"]
    where = "one node, two workers" if nodes == 1 else f"{nodes} nodes, a worker each, replicas to the peer"
    if "failed" in result:
        console.print(f"(a) {where}: FAILED: {result['failed']}", markup=False, highlight=False)
        return
    late = f"; --late-copy {result['late_copy']}" if result["late_copy"] != "auto" else ""
    table = Table(
        title=f"(a) a checkpoint at every iteration; {where}; {MODELS[result['model']]}, state "
        f"{result['state_bytes'] / 1e6:.0f} MB a rank{late}",
        caption=f"floor: {result['floor_ms']:.1f} ms, all ranks at once copying the same bytes into shared memory "
        f"({result['floor_gb_per_s_of_each_rank']:.1f} GB/s each)",
    )
    table.add_column("contender")
    columns = ("stall median", "stall mean", "last wait", "iteration", "slowdown mean", "median", "%", "x gemini-run")
    for column in (*columns, "x floor"):
        table.add_column(column, justify="right")
    for name, entry in result["contenders"].items():
        if "failed" in entry:
            table.add_row(name, f"FAILED: {entry['failed']}", style="red")
            continue
        if name == NOTHING:
            table.add_row(name, "", "", "", _ms(entry["iteration_ms"]))
            continue
        table.add_row(
            f"{name} (memmove alone)" if name == FLOOR else name,
            _ms(entry["stall_median_ms"]), _ms(entry["stall_mean_ms"]), _ms(entry["wait_at_end_median_ms"]),
            _ms(entry["iteration_ms"]), _ms(entry["slowdown_ms"]), _ms(entry["slowdown_median_ms"]),
            f"{entry['slowdown_percent']:.1f}", _ratio(entry["ratio_to_gemini_run"]), _ratio(entry["ratio_to_floor"]),
            style="bold" if name == STALL_OURS else "",
        )  # fmt: skip
    console.print(table)


def show_recovery(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="(b) SIGKILL of one of two workers: medians from the kill on")
    table.add_column("launcher")
    columns = ("first step", "first new step", "x gemini-run", "again", "lost (mean)", "iteration", "kills")
    for column in columns:
        table.add_column(column, justify="right")
    for name, entry in result["contenders"].items():
        if "failed" in entry:
            table.add_row(name, f"FAILED: {entry['failed']}", style="red")
            continue
        label = name.replace("torch.save", f"torch.save every {result['save_every']}")
        table.add_row(
            label, _s(entry["first_step_median_s"]), _s(entry["first_new_step_median_s"]),
            _ratio(entry["ratio_to_gemini_run"]), _s(entry["again_first_step_median_s"]),
            f"{entry['lost_iterations_mean']:.1f}",
            _ms(entry["iteration_ms"]), str(len(entry["kills"])), style="bold" if name == RECOVERY_OURS else "",
        )  # fmt: skip
    console.print(table)
    for name, entry in result["contenders"].items():
        if parts := entry.get("parts_median_s"):
            told = ", ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in parts.items())
            console.print(f"{name}, ms after the kill (medians): {told}", markup=False, highlight=False)
        if entry.get("zygote_bytes"):
            console.print(f"{name}: the zygote holds {entry['zygote_bytes'] / 1e6:.0f} MB", highlight=False)


def show_restore(console: Console, result: dict[str, Any]) -> None:
    where = "one worker" if result["workers"] == 1 else f"{result['workers']} workers, each of which copied a part"
    title = f"(c) {where}: {result['state_mb']:.0f} MB a rank back from the node's memory"
    if "failed" in result:
        console.print(f"{title}: FAILED: {result['failed']}", markup=False, highlight=False)
        return
    rate = result["bytes"] / 1e6 / result["restore_ms"]
    console.print(
        f"{title}: checked and restored in {_ms(result['restore_ms'])} ({rate:.1f} GB/s); one thread copies it into "
        f"memory in use in {_ms(result['copy_ms'])} ({result['share']:.2f} of that speed), into new memory in "
        f"{_ms(result['new_copy_ms'])} ({result['new_share']:.2f}); all of restore() {_ms(result['call_ms'])}",
        highlight=False,
    )


def _ms(value: float) -> str:
    return f"{value:.1f} ms"


def _s(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# --- the run ---------------------------------------------------------------------------------------


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the parts asked for, show each as it is done, and return everything."""
    results: dict[str, Any] = {
        "version": JSON_VERSION,
        "header": header(),
        "stall": [],
        "recovery": None,
        "restore": [],
    }
    show_header(console, results["header"])
    if args.part in ("a", "all"):
        stall = StallSettings(
            model=args.model, state_mb=args.state_mb, batch=args.batch, rounds=args.rounds, block=args.block,
            seed=args.seed,
            contenders=(NOTHING, *(name for name in args.contenders if name != NOTHING)),
            timeout_seconds=args.timeout, late_copy=args.late_copy,
        )  # fmt: skip
        for nodes in (args.nodes,) if args.nodes else (1, 2):
            results["stall"].append(run_stall(stall, nodes))
            show_stall(console, results["stall"][-1])
    if args.part in ("b", "all"):
        recovery = RecoverySettings(
            kills=args.kills, save_every=args.save_every, batch=args.recovery_batch, seed=args.seed,
            contenders=args.launchers,
        )  # fmt: skip
        results["recovery"] = run_recovery(recovery)
        show_recovery(console, results["recovery"])
    if args.part in ("c", "all"):
        for workers in (1, 2):
            settings = RestoreSettings(state_mb=args.restore_mb, kills=args.kills, workers=workers)
            results["restore"].append(run_restore(settings))
            show_restore(console, results["restore"][-1])
    results["load_average_at_end"] = os.getloadavg()
    return results


def gemini_run_failed(results: dict[str, Any]) -> bool:
    if any("failed" in part for part in results["restore"]):
        return True
    parts = [*results["stall"], *([results["recovery"]] if results["recovery"] else [])]
    ours = (STALL_OURS, RECOVERY_OURS)
    return any("failed" in part or any("failed" in part["contenders"].get(name, {}) for name in ours) for part in parts)


def main() -> int:
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs and their files are removed
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        results = run(args, console)
    except RuntimeError as error:
        console.print(f"bench: {error}", markup=False, highlight=False)
        return 1
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if gemini_run_failed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
