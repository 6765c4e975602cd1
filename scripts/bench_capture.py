"""What a boundary costs beside the copying: revalidating the capture plan and saying what is not a tensor.

    python scripts/bench_capture.py [--tensors 1000 10000] [--rounds 200]

Each state is a model of small layers trained by AdamW: a third of its tensors are parameters, the others moments and
step counts. `check` compares every tensor with the plan by identity, address and strides; `values` collects the
dynamic parts; `json` packs them. Medians, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gemini_run.worker import codec
from gemini_run.worker.arguments import components_of
from gemini_run.worker.capture import Plan
from gemini_run.worker.components import Component
from gemini_run.worker.layout import PlanBuilder

TARGETS = {1000: 1000.0, 10000: 10000.0}  #: tensors -> microseconds


def state(num_tensors: int) -> list[Component]:
    """A stepped model and its AdamW with `num_tensors` tensors together."""
    parameters = num_tensors // 4  # each with two moments and a step count
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(parameters // 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return components_of({"model": model, "optimizer": optimizer})


def median_us(body: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        body()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def measure(num_tensors: int, rounds: int) -> None:
    components = state(num_tensors)
    plan = Plan(components, 0, 1, 1)
    dynamic = plan.refresh(components)
    builder = PlanBuilder()

    def sink(tensor: torch.Tensor, path: str) -> dict[str, int]:
        return {"$tensor": 0}

    def checks(chosen: Sequence[Component]) -> None:
        for component in chosen:
            component.check()

    build = median_us(lambda: Plan(components, 0, 1, 1), 3)
    refresh = median_us(lambda: plan.refresh(components), rounds)
    pack = median_us(lambda: codec.pack_objects(1, plan.static, dynamic), rounds)
    total = refresh + pack
    target = TARGETS.get(num_tensors)
    verdict = "" if target is None else f"  (target {target:,.0f}: {'met' if total <= target else 'MISSED'})"
    print(f"{len(plan.sources):,} tensors: {total:,.0f} us per iteration{verdict}; building the plan {build:,.0f} us")
    for component in components:
        component.build(builder)
        check = median_us(component.check, rounds)
        values = median_us(lambda: component.dynamic(sink), rounds)  # noqa: B023
        print(f"  {component.name:>10}: check {check:8,.0f}   values {values:8,.0f}")
    print(f"  {'json':>10}: {pack:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for num_tensors in args.tensors:
        measure(num_tensors, args.rounds)


if __name__ == "__main__":
    main()
