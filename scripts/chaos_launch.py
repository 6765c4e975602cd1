"""Random failures of a small job: what `chaos.py --kind launch` does to it, and what must be true at its end."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from gemini_run.testing.compare import count_tensors, differences
from gemini_run.testing.nodes import LocalCluster, Node, free_port, wait_for

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "tests" / "cluster" / "job.py"
PATIENCE = 120.0  #: seconds until a job that makes no progress counts as stuck
SOON = 0.35  #: share of failures that come while the one before is being recovered from
FROZEN_SECONDS = (0.5, 5.0)  #: silence alone counts as loss after 2.5 s
WEIGHTS = {"worker": 4, "workers": 1, "agent": 2, "node": 3, "stop": 1, "freeze": 1, "member": 1, "cut": 1}
#: most iterations that a round may repeat: those in flight, and after the loss of a node one more
REPEATED = 2


def say(message: str = "") -> None:
    print(f"chaos: {message}" if message else "", flush=True)


class Failed(Exception):
    """An episode did not end as it must."""


@dataclasses.dataclass
class Tally:
    """What happened in all episodes. A round is a failure and the recovery from it."""

    episodes: int = 0
    rounds: int = 0
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)  # from a failure to all training again
    repeated: int = 0
    fell_back: int = 0


class Episode:
    """One job and what it is put through.

    Args:
        most: failures in this job.
    """

    def __init__(self, cluster: LocalCluster, args: argparse.Namespace, seed: int, tally: Tally, most: int) -> None:
        self.cluster = cluster
        self.args = args
        self.rng = random.Random(seed)
        self.tally = tally
        self.most = most
        self.rounds = 0
        self.world = args.nodes * args.workers
        self.out = cluster.scratch / "out"
        self.mortal = cluster.nodes[1:] if args.backend == "c10d" else cluster.nodes
        self.weakened: tuple[float, int] | None = None  # when, and how far all were, as a node was last away
        self.may_fall_back = False
        self.exposed_at: int | None = None  # a node was lost: no copy to spare until all have gone on from here
        self.began = time.monotonic()

    def run(self) -> None:
        """Raises: Failed, WaitTimeout."""
        durable = self.cluster.scratch / "durable"
        options = [f"--durable={durable}", "--durable-interval=40it", f"--rdzv-backend={self.args.backend}"]
        if self.args.backend == "gemini":
            options.append("--rdzv-endpoint=" + ",".join(f"{n.address}:{free_pair()}" for n in self.cluster.nodes))
        job = [f"--steps={self.args.steps}", f"--pause={self.args.pause}", f"--out={self.out}"]
        self.cluster.start(JOB, *job, options=options)
        self.until(lambda: self.iteration() >= 3, "the first iterations")
        while self.rounds < self.most and not self.ending():
            failed_at, done = time.time(), self.furthest()
            if not self.fail():
                time.sleep(0.02)
            elif self.rng.random() < SOON:
                time.sleep(self.rng.random())
            else:
                self.until(
                    lambda at=failed_at, done=done: self.training_since(at, done) or self.ending(),  # type: ignore[misc]
                    "training to go on",
                )
                self.time_since(failed_at)
                time.sleep(1.5 * self.rng.random())
        self.check()

    # --- failures ---------------------------------------------------------------------------------

    def fail(self) -> bool:
        """Let something happen, if it can happen now."""
        kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        happened = getattr(self, kind)()
        if happened:
            self.tally.faults[kind] += 1
            self.tally.rounds += 1
            self.rounds += 1
            if kind in ("agent", "stop", "node", "freeze", "member", "cut"):
                self.weakened = (time.time(), self.furthest())  # from when it is back
        return bool(happened)

    def worker(self) -> bool:
        return self.kill_workers(1)

    def workers(self) -> bool:
        return self.world > 1 and self.kill_workers(self.rng.randrange(2, self.world + 1))

    def kill_workers(self, count: int) -> bool:
        alive = [pid for node in self.cluster.nodes for i in range(self.args.workers) if (pid := node.worker_pid(i))]
        if len(alive) < count:
            return False
        self.note(f"SIGKILL of {count} worker{'s' * (count > 1)}")
        for pid in self.rng.sample(alive, count):
            kill(pid, signal.SIGKILL)
        return True

    def agent(self) -> bool:
        return self.end_agent(signal.SIGKILL, "SIGKILL of the agent")

    def stop(self) -> bool:
        return self.end_agent(signal.SIGTERM, "SIGTERM to the agent")

    def end_agent(self, number: signal.Signals, what: str) -> bool:
        node = self.some_node()
        if node is None:
            return False
        self.note(f"{what} of node {node.index}, which is started again")
        kill(node.pid, number)
        node.wait(PATIENCE)
        wait_for(lambda: not node.processes(), PATIENCE, f"the end of node {node.index}'s workers", context=node.tail)
        self.start_again(node)
        return True

    def node(self) -> bool:
        node = self.some_node()
        if node is None:
            return False
        if self.exposed_at is not None and self.copies_complete() <= self.exposed_at:
            self.may_fall_back = True  # what was lost before is not yet made good: nobody promised this
        self.exposed_at = self.furthest()
        self.note(f"loss of node {node.index} with its memory; a fresh one is started")
        node.kill()
        self.start_again(node)
        return True

    def freeze(self) -> bool:
        return self.silence(self.some_node(), "is frozen", Node.freeze, Node.thaw)

    def member(self) -> bool:
        """Of the rendezvous' etcd, where the nodes run it; its agent starts it again."""
        node = self.some_node() if self.args.backend == "gemini" else None
        pid = next((pid for pid in node.processes() if program(pid) == "etcd"), None) if node else None
        if node is None or pid is None:
            return False
        self.note(f"SIGKILL of node {node.index}'s etcd member")
        kill(pid, signal.SIGKILL)
        return True

    def cut(self) -> bool:
        node = self.some_node() if self.args.network else None
        return self.silence(node, "is cut off", Node.cut_link, Node.restore_link)

    def silence(self, node: Node | None, what: str, begin: Callable[[Node], None], end: Callable[[Node], None]) -> bool:
        """Nothing is heard of `node` for a while."""
        if node is None:
            return False
        seconds = self.rng.uniform(*FROZEN_SECONDS)
        self.note(f"node {node.index} {what} for {seconds:.1f} s")
        begin(node)
        time.sleep(seconds)
        end(node)
        return True

    def some_node(self) -> Node | None:
        """One that may go away now: of those that run etcd, a majority must be there at any moment."""
        if self.args.backend == "gemini" and self.weakened is not None and not self.training_since(*self.weakened):
            return None
        node = self.rng.choice(self.mortal)
        if not node.running:
            return None
        return node

    def start_again(self, node: Node) -> None:
        time.sleep(self.rng.choice([0.0, self.rng.random()]))
        self.cluster.start_node(node.index)

    # --- looking ----------------------------------------------------------------------------------

    def iteration(self) -> int:
        return self.cluster.iteration()

    def copies_complete(self) -> int:
        """Newest iteration that every rank knows to be complete everywhere, replicas included."""
        beacons = [b for node in self.cluster.nodes for b in node.beacons().values()]
        return min((b.committed for b in beacons), default=0) if len(beacons) == self.world else 0

    def furthest(self) -> int:
        return max((b.iteration for node in self.cluster.nodes for b in node.beacons().values()), default=0)

    def training_since(self, moment: float, done: int) -> bool:
        """Whether all finished an iteration in a round that began after `moment`; or, where the failure needed no
        new round, got past what was in flight then."""
        beacons = [b for node in self.cluster.nodes for b in node.beacons().values()]
        if len(beacons) == self.world and all(b.first_step_at > moment for b in beacons):
            return True
        return self.iteration() > done + 1

    def time_since(self, moment: float) -> None:
        first = [b.first_step_at for node in self.cluster.nodes for b in node.beacons().values()]
        if min(first, default=0.0) > moment:
            self.tally.seconds.append(max(first) - moment)

    def ending(self) -> bool:
        """Whether the last iterations are due: a node started again now might find nobody."""
        return self.iteration() >= self.args.steps - 3 or not all(node.running for node in self.cluster.nodes)

    def over(self) -> bool:
        return not any(node.running for node in self.cluster.nodes)

    def until(self, condition: Callable[[], object], what: str) -> None:
        def looked() -> object:
            for node in self.cluster.nodes:
                if not node.running and node.wait(0) != 0:
                    raise Failed(f"node {node.index} ended with exit code {node.wait(0)}\n{self.cluster.tail()}")
            return condition()

        self.cluster.wait_for(looked, PATIENCE, what)

    def note(self, what: str) -> None:
        say(f"  {time.monotonic() - self.began:5.1f} s  iteration {self.iteration():4}  {what}")

    # --- the end ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises: Failed."""
        self.until(self.over, "the end of training")
        rounds = self.cluster.events("round_started")
        for event in rounds:
            if event["source"] in ("local", "peer") and event["lost_iterations"] > REPEATED:
                raise Failed(f"round {event['round']} repeated {event['lost_iterations']} iterations")
        self.tally.repeated += sum({e["round"]: e["lost_iterations"] for e in rounds}.values())
        fell_back = self.cluster.events("fell_back")
        self.tally.fell_back += len({event["round"] for event in fell_back})
        if fell_back and not self.may_fall_back:
            raise Failed(f"it fell back though a copy was left: {fell_back[0]}\n{self.cluster.tail()}")
        for node in self.cluster.nodes:
            if left := node.processes():
                raise Failed(f"node {node.index} left processes behind: {left}")
            if node.memory() is not None:
                raise Failed(f"node {node.index} left its memory behind: {node.memory()}")

    def differs_from(self, reference: Path) -> list[str]:
        """Where the final state of any rank is another than the reference's."""
        import torch

        found = []
        for rank in range(self.world):
            mine, theirs = (torch.load(f / f"{rank}.pt", weights_only=True) for f in (self.out, reference))
            if not count_tensors(theirs):
                raise Failed("the reference holds no tensors: nothing would be compared")
            found += differences(mine, theirs, f"rank {rank}")
        return found


def kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended by itself, just now


def program(pid: int) -> str:
    """Name of a process's program, "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def free_pair() -> int:
    """A port that is free, as the next is: an etcd member takes both."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue  # the next is taken
