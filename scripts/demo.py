"""Train on two local nodes, kill a worker and then a whole node, and compare with a run that nothing happened to.

Run by `make demo`. Exit code 0 only if the final weights and optimizer state are equal to the bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemini_run.testing.compare import count_tensors, differences
from gemini_run.testing.nodes import (
    LocalCluster,
    NodeKind,
    WaitTimeout,
    gemini_run_program,
    require_root_namespaces,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "char_lm.py"
NUM_NODES = 2
STORE_HOST = 0  #: node 0 holds the rendezvous store; the other one is lost in this demo
WAIT_SECONDS = 240.0


def say(message: str = "") -> None:
    print(f"demo: {message}" if message else "", flush=True)


@dataclasses.dataclass(frozen=True)
class Recovery:
    """One failure and what became of it."""

    what: str
    seconds: float
    lost: int
    tiers: str


class Follower:
    """Prints what the nodes print, line by line as it comes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._read: dict[Path, int] = {}

    def pump(self) -> None:
        for node in self._cluster.nodes:
            path = node.output_path
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            for line in (whole + newline).decode(errors="replace").splitlines():
                print(f"  node {node.index} | {line}", flush=True)


class Demo:
    """A cluster in training, and failures to put it through."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.follower = Follower(cluster)

    def wait_for(self, predicate: Callable[[], Any], what: str) -> None:
        def followed() -> bool:
            self.follower.pump()
            for node in self.cluster.nodes:
                if not node.running and node.wait(0) != 0:
                    raise RuntimeError(f"node {node.index} ended with exit code {node.wait(0)}")
            return bool(predicate())

        self.cluster.wait_for(followed, WAIT_SECONDS, what)

    def reach(self, iteration: int) -> None:
        self.wait_for(lambda: self.cluster.iteration() >= iteration, f"iteration {iteration}")

    def fail(self, what: str, action: Callable[[], object]) -> Recovery:
        """Let `action` destroy something and wait until every worker has finished a new iteration."""
        before = self.cluster.iteration()
        known = len(self.cluster.events("restored"))
        say()
        say(f"*** {what}, {before} iterations finished")
        killed = time.time()
        action()

        def all_again() -> bool:
            beacons = [b for node in self.cluster.nodes for b in node.beacons().values()]
            return len(beacons) == NUM_NODES and all(b.first_step_at > killed for b in beacons)

        self.wait_for(all_again, f"the first new iteration after: {what}")
        beacons = [b for node in self.cluster.nodes for b in node.beacons().values()]
        seconds = max(b.first_step_at for b in beacons) - killed
        # A round that was overtaken by another failure has restored events too: the newest of each rank counts.
        restored = {event["rank"]: event for event in self.cluster.events("restored")[known:]}
        if len(restored) != NUM_NODES:
            raise RuntimeError(f"{len(restored)} of {NUM_NODES} ranks said that they restored: {restored}")
        lost = max(0, before - min(event["iteration"] for event in restored.values()))
        tiers = ", ".join(f"rank {rank} from {restored[rank]['source']}" for rank in sorted(restored))
        say(f"*** training again after {seconds:.2f} s; restored {tiers}; {lost} iteration(s) repeated")
        say()
        return Recovery(what, seconds, lost, tiers)

    def finish(self) -> None:
        self.wait_for(lambda: not any(node.running for node in self.cluster.nodes), "the end of training")
        self.follower.pump()


def interrupted(kind: NodeKind, steps: int, save: Path, durable: Path) -> list[Recovery]:
    """The run with failures. Returns what happened."""
    with LocalCluster(nodes=NUM_NODES, kind=kind) as cluster:
        demo = Demo(cluster)
        options = [f"--durable={durable}", f"--durable-interval={max(1, steps // 4)}it"]
        say(f"gemini-run {' '.join(cluster.options(0) + options)} {SCRIPT.name} --steps {steps}")
        cluster.start(SCRIPT, f"--steps={steps}", f"--save={save}", options=options)

        demo.reach(steps // 5)
        kill_worker = demo.fail("SIGKILL of the worker of rank 1", lambda: cluster.kill_worker(1))

        demo.reach(steps // 2)
        lost = next(node for node in cluster.nodes if node.index != STORE_HOST)

        def lose_node() -> None:
            lost.kill()
            say(f"    node {lost.index}: agent, worker and /dev/shm are gone; starting a fresh node")
            cluster.start_node(lost.index)

        rank = next(r for r in range(NUM_NODES) if cluster.node_of_rank(r) is lost)
        kill_node = demo.fail(f"loss of node {lost.index} (rank {rank}) with all its memory", lose_node)
        demo.wait_for(lambda: state(cluster) == "running", "all nodes to report that they run")
        status(cluster)
        demo.finish()
    return [kill_worker, kill_node]


def state(cluster: LocalCluster) -> str:
    """The run's state, as ``gemini-run status --json`` says it."""
    command = [*gemini_run_program(), "status", cluster.run_id, "--json"]
    done = subprocess.run(command, env=cluster.environment(), check=True, capture_output=True, text=True)
    return str(json.loads(done.stdout)["run"]["state"])


def status(cluster: LocalCluster) -> None:
    """Show what `gemini-run status` says of the run in training."""
    say("$ gemini-run status")
    command = [*gemini_run_program(), "status", cluster.run_id]
    subprocess.run(command, env=cluster.environment(), check=True)
    say()


def reference(steps: int, save: Path) -> None:
    """The same training under plain torchrun, undisturbed."""
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--standalone", f"--nproc-per-node={NUM_NODES}", str(SCRIPT)]
    arguments = [f"--steps={steps}", f"--save={save}", "--sample=0", f"--print-every={max(1, steps // 4)}"]
    with LocalCluster(nodes=1) as cluster:
        cluster.nodes[0].start([*command[1:], *arguments], program=command[:1])
        demo = Demo(cluster)
        demo.finish()


def equal(left: Path, right: Path) -> bool:
    """Compare the two files of final state and say the outcome."""
    import torch

    a, b = (torch.load(path, weights_only=True) for path in (left, right))
    found = differences(a, b)
    for difference in found[:10]:
        say(f"    differs {difference}")
    tensors = count_tensors(a)
    say(f"{tensors} tensors of weights and optimizer state: {'DIFFERENT' if found else 'torch.equal, every one'}")
    return not found and tensors > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--plain", action="store_true", help="plain processes, even where namespaces can be had")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster cleans up

    missing = "asked for with --plain" if args.plain else require_root_namespaces()
    kind: NodeKind = "process" if missing else "shm"
    say(f"two nodes, each with {'its own directory in /dev/shm' if missing else 'its own /dev/shm'}, one worker each")
    if missing:
        say(f"(plain processes: {missing})")

    with tempfile.TemporaryDirectory(prefix="gemini-run-demo-") as directory:
        scratch = Path(directory)
        durable = scratch / "durable"
        recoveries = interrupted(kind, args.steps, scratch / "interrupted.pt", durable)

        say()
        say("the durable tier (a directory here, s3://bucket/prefix on a cluster) holds:")
        for path in sorted(durable.rglob("*")):
            if path.is_file():
                say(f"    {path.relative_to(durable)}  {path.stat().st_size:,} bytes")
        say()
        say("the reference: the same script under plain torchrun, undisturbed")
        reference(args.steps, scratch / "reference.pt")

        say()
        for recovery in recoveries:
            say(
                f"{recovery.what}: training again after {recovery.seconds:.2f} s, {recovery.tiers}, "
                f"{recovery.lost} iteration(s) repeated"
            )
        return 0 if equal(scratch / "interrupted.pt", scratch / "reference.pt") else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, WaitTimeout, subprocess.CalledProcessError) as error:
        say(f"FAILED: {error}")
        sys.exit(1)
