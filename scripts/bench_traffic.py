"""What replicas cost training where the network is the bottleneck, by how they are sent.

    python scripts/bench_traffic.py [--quick] [--rate 400mbit] [--json FILE] [--plot FILE.png]

Two nodes (network namespaces) joined by links that `tc tbf` limits; DDP with state of its own on every rank, and FSDP2.
Every iteration is checkpointed and its replica sent to the other node:

blocking    training stands still until the replica has arrived
naive       the replica goes as soon as there is one, beside training
one buffer  in the network's idle spans, one chunk after the other
scheduled   in the idle spans, several chunks posted: what gemini-run does
no replicas snapshots stay on their node: what copying alone costs
none        no checkpoints: what the others are compared with

All take turns, block by block, in one job, in an order drawn from --seed. The training's arithmetic is stood in for by
sleeping, as on an accelerator; collectives, copies and replicas are real. Needs root (namespaces) and Linux's tc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import header
from rich.console import Console
from rich.table import Table

from gemini_run.testing.nodes import LocalCluster, WaitTimeout, require_root_namespaces

WORKER = Path(__file__).with_name("bench_traffic_worker.py")
JSON_VERSION = 1
KINDS = {"ddp": "DDP", "fsdp": "FSDP2"}
#: seconds of arithmetic per iteration, MB of parameters of each of six layers, MB of each rank's own state
SHAPES = {
    "ddp": {"forward": 0.10, "backward": 0.30, "update": 0.30, "layer-mb": 2.6, "own-mb": 11.0},
    "fsdp": {"forward": 0.25, "backward": 0.50, "update": 0.05, "layer-mb": 2.0, "own-mb": 0.0},
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short: shows that it works, not how well")
    parser.add_argument("--rate", default="400mbit", help="of each node's link, each way, as tc writes it")
    parser.add_argument("--kinds", default="ddp,fsdp", help="of: ddp, fsdp")
    parser.add_argument("--rounds", type=int, help="blocks of each way of sending (8; quick 2)")
    parser.add_argument("--block", type=int, help="iterations in a block (8; quick 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of blocks")
    parser.add_argument("--budget", default="1%", help="gemini-run's --overhead-budget")
    parser.add_argument("--timeout", type=float, default=1500.0, help="seconds for one kind of training")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it (PNG or SVG; needs matplotlib)")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (2 if args.quick else 8)
    args.block = args.block or (4 if args.quick else 8)
    args.kinds = args.kinds.split(",")
    if unknown := [kind for kind in args.kinds if kind not in KINDS]:
        parser.error(f"--kinds: unknown: {', '.join(unknown)}")
    return args


def run(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """One job of two nodes; returns what rank 0 measured, with its summary, or what failed."""
    environment = {"GLOO_SOCKET_IFNAME": "eth0"}
    with LocalCluster(nodes=2, kind="net", rate=args.rate, environment=environment, echo=False) as cluster:
        out = cluster.scratch / "traffic.json"
        words = [f"--{name}={value}" for name, value in SHAPES[kind].items()]
        words += [f"--kind={kind}", f"--rounds={args.rounds}", f"--block={args.block}", f"--seed={args.seed}"]
        cluster.start(WORKER, *words, f"--out={out}", options=[f"--overhead-budget={args.budget}"])
        try:
            codes = cluster.wait(args.timeout)
        except WaitTimeout as error:
            return {"failed": str(error)}
        events = cluster.events("traffic_scheduled", "interval_changed")
        if any(codes) or not out.exists():
            return {"failed": f"exit codes {codes}\n{cluster.tail()}", "events": events}
        raw = json.loads(out.read_text(encoding="utf-8"))
    return {**raw, "summary": summary(raw["lanes"]), "events": events}


def summary(lanes: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Per way of sending: medians in milliseconds, and the slowdown of training in percent.

    The slowdown of a round is that of its block's mean iteration against the block without checkpoints in the same
    round; of all rounds the median, with the quartiles as its noise.
    """
    means = {name: [statistics.mean(block["seconds"]) for block in blocks] for name, blocks in lanes.items()}
    found = {}
    for name, blocks in lanes.items():
        stalls = [stall for block in blocks for stall in block["stall"]]
        rounds = [100 * (mine / alone - 1) for mine, alone in zip(means[name], means["none"], strict=True)]
        low, middle, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else rounds * 3
        found[name] = {
            "iteration_ms": 1e3 * statistics.median(t for block in blocks for t in block["seconds"]),
            "slowdown_percent": middle,
            "slowdown_low": low,
            "slowdown_high": high,
            "stall_ms": 1e3 * statistics.median(stalls) if name != "none" else 0.0,
            "interval": max(block["interval"] for block in blocks) if name != "none" else 0,
        }
    # What none itself varies by from round to round: half the distance of its quartiles.
    alone = means["none"]
    spread = statistics.quantiles(alone, n=4) if len(alone) > 1 else alone * 3
    found["none"]["noise_percent"] = 50 * (spread[2] - spread[0]) / statistics.median(alone)
    return found


def show(console: Console, kind: str, result: dict[str, Any]) -> None:
    if "failed" in result:
        console.print(f"{KINDS[kind]}: failed: {result['failed']}", style="red", markup=False)
        return
    found = result["summary"]
    table = Table(title=f"{KINDS[kind]}: {result['plan']}", title_justify="left")
    for column in ("", "iteration, median", "slowdown, median", "quartiles", "stall of step()", "snapshot every"):
        table.add_column(column, justify="left" if not column else "right")
    for name, entry in found.items():
        if name == "none":
            noise = f"± {entry['noise_percent']:.1f} % noise"
            table.add_row(name, f"{entry['iteration_ms']:.0f} ms", "", noise, "", "")
            continue
        quartiles = f"{entry['slowdown_low']:+.1f} to {entry['slowdown_high']:+.1f} %"
        table.add_row(
            name, f"{entry['iteration_ms']:.0f} ms", f"{entry['slowdown_percent']:+.1f} %", quartiles,
            f"{entry['stall_ms']:.1f} ms", f"{entry['interval']:.0f}",
        )  # fmt: skip
    console.print(table)


def draw(file: Path, results: dict[str, Any], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole = {kind: result for kind, result in results.items() if "summary" in result}
    figure, axes = pyplot.subplots(1, len(whole), figsize=(5.2 * len(whole), 4.1), squeeze=False, sharey=True)
    for axis, (kind, result) in zip(axes[0], whole.items(), strict=True):
        found = {name: entry for name, entry in result["summary"].items() if name != "none"}
        heights = [entry["slowdown_percent"] for entry in found.values()]
        below = [max(0.0, e["slowdown_percent"] - e["slowdown_low"]) for e in found.values()]
        above = [max(0.0, e["slowdown_high"] - e["slowdown_percent"]) for e in found.values()]
        colours = ["#2a78b8" if name == "scheduled" else "#b0b7be" for name in found]
        bars = axis.bar(list(found), heights, color=colours, width=0.6, yerr=[below, above], capsize=4,
                        error_kw={"ecolor": "#444444", "lw": 1})  # fmt: skip
        axis.bar_label(bars, [f"{height:+.1f} %" for height in heights], padding=6, fontsize=9)
        noise = result["summary"]["none"]["noise_percent"]
        axis.axhspan(-noise, noise, color="#dddddd", alpha=0.6, lw=0, zorder=0, label="noise of none")
        axis.axhline(0, color="#444444", lw=0.8)
        axis.set_title(f"{KINDS[kind]}, {result['iteration_ms']:.0f} ms an iteration, "
                       f"{result['replica_bytes'] / 1e6:.0f} MB a replica", fontsize=10)  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.18)
        axis.legend(frameon=False, fontsize=8)
    axes[0][0].set_ylabel("slowdown of an iteration, %")
    title = f"Replicas at every snapshot over a link of {args.rate}\nmedian of {args.rounds} rounds, quartiles"
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    console = Console(width=150)
    if reason := require_root_namespaces(network=True):
        console.print(f"this bench {reason}", markup=False)
        return 2
    facts = header()
    console.print(f"{facts['machine']}, {facts['cores']} cores, torch {facts['torch']}, commit {facts['commit']}, "
                  f"load {facts['load_average'][0]:.1f}; {facts['command']}", markup=False)  # fmt: skip
    results = {}
    for kind in args.kinds:
        results[kind] = run(kind, args)
        show(console, kind, results[kind])
    if args.json:
        args.json.write_text(json.dumps({"version": JSON_VERSION, **facts, "results": results}, indent=1) + "\n")
    if args.plot and any("summary" in result for result in results.values()):
        draw(args.plot, results, args)
    return int(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
