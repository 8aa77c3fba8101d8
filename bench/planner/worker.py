"""Measures one case in a process of its own, with a fresh CUDA context, allocator and host memory.

python -m bench.planner.worker CASE.json OUT.json --seed 0 --steps 5

Under torchrun's environment all ranks measure the same plans together, and the first one writes down what it saw.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.planner.cases import Case
from bench.planner.descent import again, descend, plan_key
from bench.planner.draw import draw
from bench.planner.measure import Point, measure, profiled
from bench.planner.results import CaseResult
from protrain.common.errors import PlanError
from protrain.consensus import largest_of_all, of_all
from protrain.distributed.devices import own_device
from protrain.distributed.joining import join
from protrain.hardware.detection import detect
from protrain.planning import Plan

_DESCENT = 0.7  # share of a case's time; in the rest of the time the fastest plans are measured again


def main() -> None:
    """Measure the planner's plan and, depending on ``--kind``, other plans. Results are kept when time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=("accuracy", "accumulated", "regret"), default="accuracy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--traces", type=Path, help="folder for a trace of every plan")
    parser.add_argument("--until", type=float, default=float("inf"), help="start no plan after this time.time()")
    args = parser.parse_args()
    begin = time.time()
    case = Case.load(args.case)
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join(None)
    ranks.use(device)
    profile = largest_of_all(ranks, profiled(case, device))
    hardware = detect(device, device_memory=case.device_memory, host_memory=case.host_memory)
    hardware = of_all(ranks, hardware, device)
    result = CaseResult(case=case, hardware=hardware, profile=profile, points=())

    def in_time(share: float = 1.0) -> bool:
        return ranks.of_first(time.time() < begin + share * (args.until - begin))

    def run(plan: Plan | None) -> Point:
        number = len(result.points)
        traced = None if args.traces is None else args.traces / f"{case.name}-{number}.json"
        own = measure(case, plan, device, steps=args.steps, traced=traced)
        return _of_all(ranks.all_values(own, "the measurements of all ranks"))

    try:
        for point in _points(args.kind, result, run, in_time=in_time, seed=args.seed):
            result = result.with_point(point)
            if ranks.rank == 0:
                result.save(args.out)
                print(f"{case.name}  {result.row(point)}", file=sys.stderr, flush=True)
    except PlanError as error:
        sys.exit(f"{case.name}: {error}")


def _of_all(points: Sequence[Point]) -> Point:
    """The first rank's measurements, with the most memory of all ranks and an error that any of them had."""
    return replace(
        points[0],
        allocated_bytes=max(point.allocated_bytes for point in points),
        reserved_bytes=max(point.reserved_bytes for point in points),
        host_bytes=max(point.host_bytes for point in points),
        error=next((point.error for point in points if point.error), ""),
    )


def _points(
    kind: str, of: CaseResult, run: Callable[[Plan | None], Point], *, in_time: Callable[..., bool], seed: int
) -> Iterator[Point]:
    """Measure the chosen plan and those drawn at random; for "regret" also neighbours of the fastest, and it again."""
    case, profile, hardware = of.case, of.profile, of.hardware
    regret, inside, points = kind == "regret", not case.clip, [run(None)]
    yield points[0]
    seed += case.accumulation - 1  # other plans for other steps of one model
    before_again = partial(in_time, _DESCENT) if regret else in_time
    for plan in draw(profile, hardware, case.n_plans, seed=seed, step_during_backward=inside):
        if plan_key(plan) != plan_key(points[0].plan) and before_again():
            points.append(run(plan))
            yield points[-1]
    if regret:
        for point in descend(tuple(points), profile, hardware, run, step_during_backward=inside, in_time=before_again):
            points.append(point)
            yield point
        yield from again(points, run, in_time)


if __name__ == "__main__":
    main()
