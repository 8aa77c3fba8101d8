"""What each mechanism beyond the paper's four integers is worth: the best plan with it against the best without it.

python -m bench.planner.ablation --out bench/results/h100

Every case is planned with all mechanisms and without each one, for the host as it was calibrated and for a host whose
AdamW keeps 70% of that rate. One process per case then measures every distinct plan, on the host as it is and beside
real load on the host's DRAM (``bench.dram_load``) that slows its AdamW to about 70%. A plan that is predicted
to be within 0.5% of the best is not measured: what it lacks cannot be worth 3%.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import protrain
from bench.dram_load import DramLoad
from bench.planner.cases import Case
from bench.planner.measure import WARM_UP, Training, profiled
from protrain.cli.options import writable_folder
from protrain.cli.summary import device_name, versions
from protrain.common.errors import BudgetError, PlanError
from protrain.common.records import Record
from protrain.common.tables import aligned
from protrain.hardware.detection import detect
from protrain.planning import Plan, search
from protrain.planning.rates import with_host

FILE = "ablation.json"
MECHANISMS = ("n_weight_only", "keep_attention", "stream")
SLOW = 0.7  # of the host's rate
WORTH = 0.005  # a plan predicted to be this close to the best on every host is not measured
STEPS = 3  # timed, on the host as it is and beside the load


def _case(shape: str, layers: int, batch: int, sequence: int, device_memory: str | None = None) -> Case:
    return Case(
        shape=shape, layers=layers, batch=batch, sequence=sequence, compile=True, device_memory=device_memory, n_plans=0
    )


CASES = (
    _case("llama-7b", 32, 8, 2048, "24GiB"),
    _case("llama-7b", 32, 8, 2048),
    _case("llama3-8b", 32, 8, 2048),
    _case("llama3-8b", 32, 2, 2048),
    _case("llama-7b", 32, 2, 2048),
    _case("llama2-13b", 40, 8, 2048),
    _case("gpt2-10b", 48, 16, 1024),
    _case("llama-7b", 32, 1, 32768),
    _case("llama-7b", 32, 32, 2048),
)
TRIAL = (Case(shape="tiny", layers=4, batch=2, sequence=64, n_plans=0, device_memory="64MiB"),)


@dataclass(frozen=True, kw_only=True)
class Choice(Record):
    """The best plan without one mechanism (or "nothing") for one host."""

    without: str
    slow_host: bool  # planned for
    plan: int  # index into Ablated.plans
    predicted_ms: float


@dataclass(frozen=True, kw_only=True)
class Ablated(Record):
    """One case."""

    file_kind = "the ablation of one case"

    case: Case
    choices: tuple[Choice, ...]
    plans: tuple[Plan, ...]
    step_ms: tuple[tuple[float, ...], ...]  # by plan, on the host as it is; empty where not measured
    loaded_ms: tuple[tuple[float, ...], ...]  # beside the load
    host_gparams: tuple[float, float]  # of AdamW alone, and beside the load

    def with_times(self, plan: int, step_ms: tuple[float, ...], loaded_ms: tuple[float, ...]) -> Ablated:
        """The record with the times of one more plan."""

        def put(times: tuple[tuple[float, ...], ...], of_plan: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
            return (*times[:plan], of_plan, *times[plan + 1 :])

        return replace(self, step_ms=put(self.step_ms, step_ms), loaded_ms=put(self.loaded_ms, loaded_ms))


@dataclass(frozen=True, kw_only=True)
class Ablation(Record):
    """A whole run."""

    file_kind = "what bench.planner.ablation writes"

    command: str
    device: str
    versions: dict[str, str]
    cases: tuple[Ablated, ...]

    def table(self) -> str:
        """By case, host and mechanism: how much longer the best plan without it takes, predicted and measured."""
        rows = [("case", "host", "without", "predicted", "measured", "median", "plan")]
        for one in self.cases:
            for slow in (False, True):
                of_host = [choice for choice in one.choices if choice.slow_host is slow]
                best = next(choice for choice in of_host if choice.without == "nothing")
                for choice in of_host:
                    times = (one.loaded_ms if slow else one.step_ms)[choice.plan]
                    best_times = (one.loaded_ms if slow else one.step_ms)[best.plan]
                    share = ""
                    if times and best_times:
                        share = f"{statistics.median(times) / statistics.median(best_times) - 1:+.1%}"
                    rows.append(
                        (
                            one.case.name,
                            "slowed" if slow else "as it is",
                            choice.without,
                            f"{choice.predicted_ms / best.predicted_ms - 1:+.1%}",
                            share,
                            f"{statistics.median(times):.0f} ms" if times else "",
                            str(one.plans[choice.plan]),
                        )
                    )
        return aligned(rows)


def _planned(case: Case, device: torch.device) -> tuple[list[Plan], list[Choice]]:
    profile = profiled(case, device)
    hardware = detect(device, device_memory=case.device_memory, host_memory=case.host_memory)
    plans: list[Plan] = []
    known: dict[tuple[int, ...], int] = {}
    choices = []
    for slow in (False, True):
        machine = with_host(hardware, SLOW if slow else 1.0)
        for mechanism in ("nothing", *MECHANISMS):
            left_out = () if mechanism == "nothing" else (mechanism,)
            plan = search(profile, machine, step_during_backward=not case.clip, without=left_out)
            key = (*plan.counts, plan.keep_attention, plan.stream)
            if key not in known:
                known[key] = len(plans)
                plans.append(plan)
            choices.append(Choice(without=mechanism, slow_host=slow, plan=known[key], predicted_ms=plan.step_ms))
    return plans, choices


def _wanted(plans: list[Plan], choices: list[Choice]) -> list[int]:
    """Plans that are the best of a host, or clearly slower than that without a mechanism."""
    wanted: list[int] = []
    for slow in (False, True):
        best = next(choice for choice in choices if choice.slow_host is slow and choice.without == "nothing")
        for choice in choices:
            clearly = choice.predicted_ms > best.predicted_ms * (1 + WORTH)
            if choice.slow_host is slow and (choice is best or clearly) and choice.plan not in wanted:
                wanted.append(choice.plan)
    return wanted


def _measured(
    case: Case, plan: Plan, device: torch.device, load: DramLoad | None, loaders: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Step times on the host as it is, and beside the load."""
    training = Training(case, plan, device)
    step_ms = training.run(WARM_UP + STEPS)[WARM_UP:]
    with load.running(loaders) if load is not None else nullcontext():
        return step_ms, training.run(WARM_UP + STEPS)[WARM_UP:]


def _work(case: Case, out: Path, until: float, loaders: float) -> None:
    """Plan and measure one case."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plans, choices = _planned(case, device)
    for choice in choices:
        print(
            f"{case.name} slow={choice.slow_host} without {choice.without}: {choice.predicted_ms:.0f} ms "
            f"{plans[choice.plan]}",
            file=sys.stderr,
            flush=True,
        )
    hardware = detect(device)
    threads = hardware.host_adam_threads or 1
    load, rates = None, (0.0, 0.0)
    if device.type == "cuda":
        load = DramLoad(threads=threads)
        found_load = load.leaving(SLOW, loaders=loaders)
        loaders, rates = found_load.loaders, (found_load.alone_gparams, found_load.loaded_gparams)
        print(found_load, file=sys.stderr, flush=True)
    found = Ablated(
        case=case,
        choices=tuple(choices),
        plans=tuple(plans),
        step_ms=((),) * len(plans),
        loaded_ms=((),) * len(plans),
        host_gparams=rates,
    )
    try:
        for index in _wanted(plans, choices):
            if time.time() > until:
                break
            try:
                found = found.with_times(index, *_measured(case, plans[index], device, load, loaders))
                medians = (statistics.median(times[index]) for times in (found.step_ms, found.loaded_ms))
                text = "{:.0f} ms, loaded {:.0f} ms".format(*medians)
            except (torch.OutOfMemoryError, BudgetError, PlanError) as error:
                text = str(error).splitlines()[0]
            print(f"{case.name} {plans[index]}: {text}", file=sys.stderr, flush=True)
            found.save(out)
    finally:
        if load is not None:
            load.close()


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="bench.planner.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=writable_folder, default=Path("."))
    parser.add_argument("--only", default="", help="comma-separated indices of cases")
    parser.add_argument("--host-memory")
    parser.add_argument("--time-limit", type=float, default=float("inf"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--loaders", type=float, default=0.0, help="of the DRAM load (default: find out)")
    args = parser.parse_args(arguments)
    if args.worker is not None:
        _work(Case.load(args.worker), args.out, args.until, args.loaders)
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    until = time.time() + args.time_limit
    if device.type == "cuda" and detect(device).source != "measured":
        protrain.calibrate(device)
    hardware = detect(device, host_memory=args.host_memory)
    args.out.mkdir(parents=True, exist_ok=True)
    cases = CASES if device.type == "cuda" else TRIAL
    chosen = [int(part) for part in args.only.split(",")] if args.only else range(len(cases))
    found = []
    loaders = args.loaders
    if device.type == "cuda" and not loaders:
        load = DramLoad(threads=hardware.host_adam_threads or 1)
        loaders = load.leaving(SLOW).loaders
        load.close()
    for index in chosen:
        case = cases[index].beside_load(hardware)
        if time.time() > until:
            break
        source, out = args.out / f"case-{index}.json", args.out / f"ablated-{index}.json"
        case.save(source)
        command = [sys.executable, "-m", "bench.planner.ablation", "--worker", str(source), "--out", str(out)]
        command += ["--loaders", str(loaders)]
        subprocess.run([*command, "--until", str(until)], check=False)
        if out.exists():
            found.append(Ablated.load(out))
    result = Ablation(
        command=f"python -m bench.planner.ablation {shlex.join(arguments)}",
        device=device_name(device),
        versions=versions(),
        cases=tuple(found),
    )
    result.save(args.out / FILE)
    print(result.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
