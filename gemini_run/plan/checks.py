"""What the formulas say beside what drawing and playing failures gives, correlated ones included. Pure."""

from __future__ import annotations

import dataclasses

from gemini_run.plan.advice import durable_choice
from gemini_run.plan.goodput import gemini
from gemini_run.plan.job import Job
from gemini_run.plan.placement import placement
from gemini_run.plan.probability import domain_recovery, recovery_probability
from gemini_run.plan.simulate import Estimate, Random, draw_losses, play_gemini

#: what the goodput formula may be off: it takes a mean wait, and a lost domain by itself
GOODPUT_TOLERANCE = 0.005
_DAYS = 20.0


@dataclasses.dataclass(frozen=True)
class Check:
    """A formula's value and its estimate; `tolerance` is what the formula itself leaves out (0: exact)."""

    what: str
    formula: float
    estimate: Estimate
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Within four standard errors, and the tolerance."""
        return abs(self.formula - self.estimate.mean) <= 4 * self.estimate.error + self.tolerance + 1e-12


def monte_carlo(rng: Random, trials: int) -> list[Check]:
    """The checks of `plan --reproduce`.

    Args:
        trials: draws per probability; a hundredth as many runs of 20 days per goodput, at least 10.
    """
    checks = []
    for nodes, replicas, lost in ((16, 2, 2), (16, 2, 3), (16, 2, 4), (17, 3, 4), (18, 4, 6)):
        plan = placement(nodes, replicas)
        kind = "mixed" if plan.ring else "group"
        exact = float(recovery_probability(plan, lost)[lost])
        checks.append(
            Check(f"{kind} placement N={nodes} m={replicas}, {lost} nodes lost", exact,
                  draw_losses(plan, lost, trials, rng))
        )  # fmt: skip
    racks = [f"rack{node // 4}" for node in range(16)]
    for what, plan in (("racks unknown", placement(16, 2)), ("racks known", placement(16, 2, domains=racks))):
        for lost in (1, 2):
            exact = float(domain_recovery(plan, racks, lost)[lost])
            estimate = draw_losses(plan, lost, trials, rng, domains=racks)
            checks.append(Check(f"{what}: N=16 m=2, {lost} of 4 racks lost", exact, estimate))
    for what, job in _jobs():
        interval = durable_choice(job).seconds
        estimate = play_gemini(job, interval, _DAYS, max(10, trials // 100), rng)
        checks.append(Check(f"goodput, {what}", gemini(job, interval).goodput, estimate, GOODPUT_TOLERANCE))
    return checks


def _jobs() -> list[tuple[str, Job]]:
    job = Job(
        num_nodes=16, state_bytes=1.2e12, replicas=2, network_bytes_per_s=50e9, storage_bytes_per_s=2.5e9,
        iteration_s=62.0, failures_per_node_day=0.5,
    )  # fmt: skip
    racks = dataclasses.replace(job, domain_nodes=4, domain_failures_per_day=0.25)
    return [
        ("8 nodes lost a day, no spares", job),
        ("the same, and one rack of 4 a day", racks),
        ("the same with 5 spares", dataclasses.replace(racks, spares=5)),
        ("m=1: every lost node falls back", dataclasses.replace(job, replicas=1)),
    ]
