"""Random failures for as long as you like: every run must end with the very state of one that nothing happened to.

Short jobs (episodes), one after the other. --kind launch kills workers, agents, nodes and members of the rendezvous,
stops agents, freezes nodes and (--network) cuts links, also while the job recovers from the failure before. Exit code 0
only if all recovered without help and each job ended well: exit codes, weights, optimizer state and generators equal to
the bit, no more repeated than promised, no fall back while a copy was left, no process and no memory left behind. An
episode that failed can be had again, as far as time is the same: --seed.

    python scripts/chaos.py --kind launch --rounds 100
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos_launch import JOB, Episode, Failed, Tally, say

from gemini_run.testing.nodes import LocalCluster, NodeKind, WaitTimeout, require_root_namespaces

ROUNDS_OF_AN_EPISODE = 12  #: so that jobs also begin and end under fire


def reference(args: argparse.Namespace, out: Path) -> None:
    """The job under plain torchrun, undisturbed. Raises: subprocess.CalledProcessError."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.nodes * args.workers}", str(JOB), f"--steps={args.steps}", f"--out={out}"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def chaos(args: argparse.Namespace, scratch: Path) -> Tally:
    """Raises: Failed, WaitTimeout."""
    end = time.monotonic() + 60 * args.minutes
    tally = Tally()
    reference(args, scratch / "reference")
    seed = args.seed
    while tally.rounds < args.rounds and (not tally.episodes or time.monotonic() < end):
        say(f"episode {tally.episodes + 1}, --seed {seed}, {tally.rounds} of {args.rounds} rounds done")
        with LocalCluster(nodes=args.nodes, workers_per_node=args.workers, kind=args.node_kind, echo=False) as cluster:
            most = min(ROUNDS_OF_AN_EPISODE, args.rounds - tally.rounds)
            episode = Episode(cluster, args, seed, tally, most)
            try:
                episode.run()
                if found := episode.differs_from(scratch / "reference"):
                    raise Failed("the final state is another: " + "; ".join(found[:5]))
            except (Failed, WaitTimeout):
                keep(cluster, args.keep)
                raise
        tally.episodes += 1
        seed += 1
    return tally


def keep(cluster: LocalCluster, where: Path | None) -> None:
    """Copy what the nodes said, and the events, out of a failed episode."""
    if where is None:
        return
    where.mkdir(parents=True, exist_ok=True)
    for path in [*cluster.scratch.glob("*.out"), cluster.paths.events]:
        if path.exists():
            (where / path.name).write_bytes(path.read_bytes())
    say(f"its logs are in {where}")


def report(tally: Tally) -> None:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in tally.faults.most_common())
    say(f"{tally.rounds} of {tally.rounds} rounds recovered, none needed help; {tally.episodes} episode(s): {kinds}")
    if tally.seconds:
        say(
            f"training again after {statistics.median(tally.seconds):.2f} s (median of {len(tally.seconds)}), at most "
            f"{max(tally.seconds):.2f} s; frozen, cut off and started nodes included"
        )
    say(f"{tally.repeated} iteration(s) repeated, {tally.fell_back} time(s) back to the durable tier")
    say("every final state is torch.equal to the undisturbed run's")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kind", choices=["launch"], default="launch", help="what is put under fire")
    parser.add_argument("--rounds", type=int, default=100, help="failures, each with its recovery (100)")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no episode after these (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the first episode; each has the next")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="per node")
    parser.add_argument("--steps", type=int, default=240, help="iterations of each job")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that an iteration takes longer")
    parser.add_argument("--backend", choices=["c10d", "gemini"], default="gemini",
                        help="c10d: the first node lives; gemini: any may be lost")  # fmt: skip
    parser.add_argument("--network", action="store_true", help="nodes have a network of their own, links are cut too")
    parser.add_argument("--plain", action="store_true", help="plain processes, even where namespaces can be had")
    parser.add_argument("--keep", type=Path, help="folder for the logs of an episode that failed")
    args = parser.parse_args(argv)
    if args.network and (reason := require_root_namespaces(network=True)):
        parser.error(f"--network {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster cleans up
    kind: NodeKind = "net" if args.network else "process" if args.plain or require_root_namespaces() else "shm"
    args.node_kind = kind
    with tempfile.TemporaryDirectory(prefix="gemini-run-chaos-") as scratch:
        try:
            report(chaos(args, Path(scratch)))
        except (Failed, WaitTimeout, subprocess.CalledProcessError) as error:
            say(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
