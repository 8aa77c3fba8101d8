"""How a plan does on a host that is slower than it was calibrated, beside plans for that host and beside the floor.

    python -m bench.planner.slow_host --time-limit 550 --out results     # given again, it goes on where it ended

Real load on the host's DRAM (bench.dram_load) slows its AdamW to 70% and to 50% of its rate. One process
measures everything, as a cold start of a large model takes a minute, and no plan is built more than once:

1. The plan for the host as it is: without load, beside each load, and while each load is switched on and off.
2. The floor with this plan's recomputed blocks: forward and backward alone (bench.train). It needs no host, but the
   load also takes cores from the thread that launches kernels.
3. The plan that is searched for a host at 70%, and for one at 50%, each beside its load.
4. Plans that somebody would try by hand around these (bench.planner.by_hand), each beside its load.
5. The first plan once more beside each load, as a host may be slower in one minute than in the next.

Every row is written as soon as it is measured. Plans on a settled host are compared by the median step. While the load
is switched, they are compared by the mean step, which has in it what getting used to the host takes.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from bench.calibrated import calibrate_once
from bench.dram_load import DramLoad
from bench.planner.by_hand import moves
from bench.planner.cases import Case
from bench.planner.clock import durations_ms, now
from bench.planner.descent import plan_key
from bench.planner.measure import Training, build, profiled
from bench.planner.slow_host_record import Floor, Host, Row, SlowHost, Tried
from bench.train.task import Task
from bench.train.trainers import floor_under
from protrain.cli.options import writable_folder
from protrain.cli.summary import device_name, versions
from protrain.common.errors import BudgetError, PlanError
from protrain.forward.compilation import graphs_compiled
from protrain.hardware.detection import detect
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan, predict, search
from protrain.planning.rates import with_host
from protrain.profiler.model_profile import ModelProfile

FILE = "slow_host.json"
SHARES = (0.7, 0.5)  # of the host's rate
UNTIMED = 3  # steps on a host that is to have settled: the engine goes by the rate of the last few updates
CASE = Case(shape="llama-7b", layers=32, batch=8, sequence=2048, compile=True, n_plans=0)
TRIAL = Case(shape="tiny", layers=4, batch=2, sequence=64, n_plans=0, device_memory="28MiB")


def planned(case: Case, profile: ModelProfile, hardware: HardwareProfile) -> list[Tried]:
    """All plans in the order in which they are measured. Each is there once, with the hosts that it is measured on."""
    inside = not case.clip
    found: dict[tuple[int, ...], Tried] = {}

    def add(name: str, plan: Plan, *shares: float) -> None:
        known = found.get(plan_key(plan))
        if known is None:
            found[plan_key(plan)] = Tried(name=name, shares=shares, plan=plan)
        else:
            both = (*known.shares, *(share for share in shares if share not in known.shares))
            found[plan_key(plan)] = replace(known, name=f"{known.name}; {name}", shares=both)

    as_it_is = search(profile, hardware, step_during_backward=inside)
    add("planned for 100%", as_it_is, 1.0, *SHARES)
    for_host = {
        share: search(profile, with_host(hardware, share), known=[as_it_is], step_during_backward=inside)
        for share in SHARES
    }
    for share, plan in for_host.items():
        add(f"planned for {share:.0%}", plan, share)
    by_hand = {
        share: list(moves(plan, profile, hardware, step_during_backward=inside)) for share, plan in for_host.items()
    }
    # In turns, so that a run that ends early has some for each host.
    for turn in range(max(map(len, by_hand.values()))):
        for share, plans in by_hand.items():
            if turn < len(plans):
                move, plan = plans[turn]
                add(f"for {share:.0%}, {move}", plan, share)
    return [*found.values(), Tried(name="planned for 100%, again", shares=SHARES, plan=as_it_is)]


def hosts_of(record: SlowHost, index: int) -> list[Host]:
    """The hosts that plan ``index`` is measured on, in order."""
    settled = [Host(share=share) for share in record.tried[index].shares]
    if index or not record.switch_every:
        return settled
    return settled + [Host(share=to, after=after) for share in SHARES for to, after in ((share, 1.0), (1.0, share))]


class _Runner:
    """Measures what a record lacks, until the time is up."""

    def __init__(self, record: SlowHost, load: DramLoad | None, out: Path, until: float) -> None:
        self.record = record
        self._load, self._out, self._until = load, out, until
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._profile = profiled(record.case, self._device)
        self._hardware = _machine(record.case, self._device)
        self._build_s = 0.0  # that the last plan took

    def run(self) -> None:
        """Everything in order. What the time does not suffice for is left out."""
        if not self.record.tried:
            self._keep(replace(self.record, tried=tuple(planned(self.record.case, self._profile, self._hardware))))
        for index in range(len(self.record.tried)):
            self._plan(index)
            if index == 0:
                self._floor()

    def _keep(self, record: SlowHost) -> None:
        self.record = record
        record.save(self._out)

    def _beside(self, share: float) -> AbstractContextManager[None]:
        if self._load is None or share == 1.0:
            return nullcontext()
        return self._load.running(self.record.loaders(share))

    def _in_time(self, seconds: float) -> bool:
        return time.time() + seconds <= self._until

    def _plan(self, index: int) -> None:
        """Build plan ``index``, and measure it on all hosts that are missing."""
        tried = self.record.tried[index]
        missing = [host for host in hosts_of(self.record, index) if not self.record.has(index, host)]
        if tried.error or not missing or not self._in_time(self._build_s):
            return
        begin = time.time()
        try:
            training = Training(self.record.case, tried.plan, self._device)
            step_s = training.run(UNTIMED)[-1] / 1e3  # the first one compiles
            self._build_s = time.time() - begin
            before = 1.0
            for host in missing:
                untimed = UNTIMED if host.after is None else 0
                wanted = self.record.steps if host.after is None else self.record.switch_every
                if not self._in_time((untimed + wanted) * step_s):
                    break
                if host.after is not None and host.after != before:
                    with self._beside(host.after):
                        training.run(UNTIMED)
                row = self._row(training, index, host, untimed + wanted, untimed)
                step_s, before = row.typical_ms / 1e3, host.share
                self._keep(replace(self.record, measured=(*self.record.measured, row)))
                print(f"{tried.name}, host {host}: {row.typical_ms:.1f} ms", file=sys.stderr, flush=True)
        except (torch.OutOfMemoryError, BudgetError, PlanError) as error:
            failed = replace(tried, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
            every = self.record.tried
            self._keep(replace(self.record, tried=(*every[:index], failed, *every[index + 1 :])))
            print(f"{tried.name}: {failed.error}", file=sys.stderr, flush=True)

    def _row(self, training: Training, index: int, host: Host, steps: int, untimed: int) -> Row:
        case, optimizer = self.record.case, training.optimizer
        # so that the rate in the report is that of these steps
        optimizer._engine.updates.host.rate.updates.clear()
        before = optimizer.report()
        with self._beside(host.share):
            step_ms = training.run(steps)
        after = optimizer.report()
        machine = with_host(self._hardware, host.share)
        plan = self.record.tried[index].plan
        return Row(
            tried=index,
            host=host,
            step_ms=step_ms,
            untimed=untimed,
            predicted_ms=predict(self._profile, machine, plan, step_during_backward=not case.clip).step_ms,
            host_gparams=after.host_gparams,
            streamed_updates=after.streamed_updates - before.streamed_updates,
            speculative_updates=after.speculative_updates - before.speculative_updates,
            redone_updates=after.redone_updates - before.redone_updates,
            compiled_graphs=graphs_compiled(),
        )

    def _floor(self) -> None:
        """Measure the floor of the first plan where it is missing."""
        case, steps = self.record.case, UNTIMED + self.record.steps
        missing = [share for share in (1.0, *SHARES) if share not in {one.share for one in self.record.floors}]
        if not missing or not self._in_time(self._build_s):
            return
        _free(self._device)
        task = Task(
            model=case.shape, layers=case.layers, batch=case.batch, sequence=case.sequence, steps=steps, warm_up=UNTIMED
        )
        floor = floor_under(self.record.tried[0].plan, task, self._device, compile=case.compile)
        ids = build(case)[2]["input_ids"].to(self._device)
        for share in missing:
            with self._beside(share):
                moments = [now(self._device)]
                for _ in range(steps):
                    floor.step(ids)
                    moments.append(now(self._device))
                step_ms = durations_ms(moments, self._device)
            found = Floor(share=share, step_ms=step_ms, untimed=UNTIMED)
            self._keep(replace(self.record, floors=(*self.record.floors, found)))
            print(f"floor, host {share:.0%}: {found.typical_ms:.1f} ms", file=sys.stderr, flush=True)


def _free(device: torch.device) -> None:
    """Give back the memory of the model that was dropped last: its hooks and engine refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _machine(case: Case, device: torch.device) -> HardwareProfile:
    return detect(device, device_memory=case.device_memory, host_memory=case.host_memory)


def _begun(args: argparse.Namespace, file: Path, command: str, device: torch.device) -> SlowHost:
    """The record in ``file``, to be gone on with, or a new one. SystemExit if it is that of another run."""
    if not file.exists():
        case = CASE if device.type == "cuda" else TRIAL
        return SlowHost(
            commands=(command,),
            device=device_name(device),
            versions=versions(),
            case=case.beside_load(detect(device, device_memory=args.device_memory, host_memory=args.host_memory)),
            calibrated_gparams=detect(device).host_adam_gparams,
            steps=args.steps,
            switch_every=args.switch_every,
        )
    record = SlowHost.load(file)
    theirs = record.device, record.versions, record.steps, record.switch_every
    ours = device_name(device), versions(), args.steps, args.switch_every
    # The rate of a calibration is measured, so no two calibrations have the same.
    if theirs != ours or (device.type == "cuda" and record.calibrated_gparams != detect(device).host_adam_gparams):
        sys.exit(f"{file} is of another machine, calibration, version or number of steps: choose another --out")
    return replace(record, commands=(*record.commands, command))


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.planner.slow_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=writable_folder, default=Path("."), help=f"folder for {FILE} (default: this one)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps on a settled host (default: 10)")
    parser.add_argument(
        "--switch-every", type=int, default=50, help="steps after which the load is switched; 0: not (default: 50)"
    )
    parser.add_argument("--device-memory", help="limit, as 78GiB (default: what is free)")
    parser.add_argument("--host-memory", help="limit, as 120GiB, less what the load takes (default: what is free)")
    parser.add_argument("--quick", action="store_true", help="3 timed steps, and the load switched after 5")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds for what is begun")
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.switch_every = 3, 5
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    arguments = sys.argv[1:] if argv is None else argv
    args = _arguments(arguments)
    until = time.time() + args.time_limit
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("no GPU here, and so no load: this checks that everything runs", file=sys.stderr)
    calibrate_once()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / FILE
    record = _begun(args, file, f"python -m bench.planner.slow_host {shlex.join(arguments)}", device)
    load = None
    if device.type == "cuda":
        load = DramLoad(threads=detect(device).host_adam_threads or 1)
        for share in SHARES:
            found = load.leaving(share, loaders=record.loaders(share))
            print(found, file=sys.stderr, flush=True)
            record = replace(record, loads=(*record.loads, found))
    try:
        runner = _Runner(record, load, file, until)
        runner.run()
    finally:
        if load is not None:
            load.close()
    print(runner.record.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
