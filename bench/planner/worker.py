"""One case in a process of its own: a CUDA context, an allocator and host memory that nothing was done with before.

python -m bench.planner.worker CASE.json OUT.json --seed 0 --steps 5
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from bench.planner.cases import Case
from bench.planner.draw import draw
from bench.planner.measure import measure, profiled
from bench.planner.results import CaseResult
from protrain.errors import PlanError
from protrain.hardware import detect


def main() -> None:
    """Measure the planner's plan and others drawn at random; what is done stays when the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--until", type=float, default=float("inf"), help="no plan is begun after this time.time()")
    args = parser.parse_args()
    case = Case.load(args.case)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    profile = profiled(case, device)
    hardware = detect(device, device_memory=case.device_memory, host_memory=case.host_memory)
    result = CaseResult(case=case, hardware=hardware, profile=profile, points=())
    plans = draw(profile, hardware, case.n_plans, seed=args.seed, step_during_backward=not case.clip)
    for plan in (None, *plans):
        if time.time() > args.until:
            break
        try:
            point = measure(case, plan, device, steps=args.steps)
        except PlanError as error:
            sys.exit(f"{case.name}: {error}")
        result = result.with_point(point)
        result.save(args.out)
        print(f"{case.name}  {result.row(point)}", flush=True)


if __name__ == "__main__":
    main()
