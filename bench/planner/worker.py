"""Measures one case in a process of its own, with a fresh CUDA context, allocator and host memory.

python -m bench.planner.worker CASE.json OUT.json --seed 0 --steps 5
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.allocator import forbid_more
from bench.planner.cases import Case
from bench.planner.descent import again, descend
from bench.planner.draw import draw
from bench.planner.measure import Point, measure, profiled
from bench.planner.results import CaseResult
from protrain.common.errors import PlanError
from protrain.hardware import HardwareProfile, detect
from protrain.planning import Plan
from protrain.profiler import ModelProfile

_DESCENT = 0.7  # share of a case's time; in the rest of the time the fastest plans are measured again


def main() -> None:
    """Measure the planner's plan and, depending on ``--kind``, other plans. Results are kept when time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=("accuracy", "regret", "limits"), default="accuracy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--traces", type=Path, help="folder for a trace of every plan")
    parser.add_argument("--until", type=float, default=float("inf"), help="start no plan after this time.time()")
    args = parser.parse_args()
    begin = time.time()
    case = Case.load(args.case)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.kind == "limits":
        forbid_more(case.device_memory, device)
    profile = profiled(case, device)
    hardware = detect(device, device_memory=case.device_memory, host_memory=case.host_memory)
    hardware = replace(hardware, figures=())  # no prediction needs them, and a record would repeat them for every case
    result = CaseResult(case=case, hardware=hardware, profile=profile, points=())

    def in_time(share: float = 1.0) -> bool:
        return time.time() < begin + share * (args.until - begin)

    def run(plan: Plan | None) -> Point:
        number = len(result.points)
        traced = None if args.traces is None else args.traces / f"{case.name}-{number}.json"
        return measure(case, plan, device, steps=args.steps, traced=traced)

    inside = not case.clip
    try:
        for point in _points(args, case, profile, hardware, run, in_time=in_time, step_during_backward=inside):
            result = result.with_point(point)
            result.save(args.out)
            print(f"{case.name}  {result.row(point)}", file=sys.stderr, flush=True)
    except PlanError as error:
        if args.kind != "limits":
            sys.exit(f"{case.name}: {error}")
        result.save(args.out)
        print(f"{case.name}  nothing fits, and nothing was tried: {str(error).splitlines()[0]}", file=sys.stderr)


def _points(
    args: argparse.Namespace,
    case: Case,
    profile: ModelProfile,
    hardware: HardwareProfile,
    run: Callable[[Plan | None], Point],
    *,
    in_time: Callable[..., bool],
    step_during_backward: bool,
) -> Iterator[Point]:
    if args.kind == "regret":
        points = []
        for point in descend(
            profile,
            hardware,
            run,
            others=case.n_plans,
            seed=args.seed,
            step_during_backward=step_during_backward,
            in_time=partial(in_time, _DESCENT),
        ):
            points.append(point)
            yield point
        yield from again(points, run, in_time)
        return
    yield run(None)
    if args.kind == "accuracy":
        for plan in draw(profile, hardware, case.n_plans, seed=args.seed, step_during_backward=step_during_backward):
            if in_time():
                yield run(plan)


if __name__ == "__main__":
    main()
