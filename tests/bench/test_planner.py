"""bench.planner: what it records can be judged anew, and its verdicts are those of the figures."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import protrain
from bench.allocator import forbid_more
from bench.planner.__main__ import FILES, main
from bench.planner.accuracy import errors_of, limits_table, regret, regret_table
from bench.planner.beside import beside_each_other
from bench.planner.cases import ACCUMULATED, CASES, REGRET, SMOKE, Case, random_limits
from bench.planner.descent import again, descend
from bench.planner.draw import draw
from bench.planner.measure import Point, Training, build, measure, profiled
from bench.planner.results import CaseResult, Results
from protrain.engine.updates.host_updates import Window
from protrain.hardware.detection import detect
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load
from protrain.planning import MemoryModel, Plan, evaluate, pack
from protrain.profiler.model_profile import ModelProfile
from tests.bench.forked import ForkedWorkers

SMALLEST = replace(SMOKE[0], layers=2, sequence=16, n_plans=1)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    model, optimizer, batch = build(SMOKE[0])
    return protrain.profile(model, batch, optimizer=optimizer, device=torch.device("meta"), dtype=torch.bfloat16)


def machine(device_bytes: int = 40 * 2**20) -> HardwareProfile:
    return replace(load("h100"), device_bytes=device_bytes, host_bytes=2**30)


def point(plan: Plan, ms: float, *, device: float = 1.0, error: str = "") -> Point:
    return Point(
        plan=plan,
        step_ms=() if error else (ms, ms * 1.1, ms * 0.9),
        allocated_bytes=int(plan.device_bytes / device),
        reserved_bytes=int(1.1 * plan.device_bytes / device),
        host_bytes=plan.host_bytes,
        host_gparams=5.0,
        wrap_s=0.1,
        error=error,
    )


@pytest.mark.slow
def test_plans_are_drawn_from_all_that_fit(profile: ModelProfile) -> None:
    needed = MemoryModel(profile, machine(), pack(profile, 2**20))
    assert needed.static_bytes(0, 1) < machine(2**28).device_bytes
    plans = draw(profile, machine(2**28), 12, seed=3)
    keys = {str(plan) for plan in plans}
    assert len(keys) == 12
    assert all(plan.device_bytes <= 2**28 for plan in plans)
    assert [str(plan) for plan in plans] == [str(plan) for plan in draw(profile, machine(2**28), 12, seed=3)]
    assert len({plan.n_persist for plan in plans}) > 1
    assert len({plan.n_ckpt for plan in plans}) > 1
    assert len({plan.n_ckpt_swap for plan in plans}) > 1
    assert len({plan.n_speculate for plan in plans}) > 1
    assert draw(profile, machine(2**20), 2, seed=0) == [], "nothing fits"


def test_plans_of_accumulated_steps_have_sums_on_the_device_too(profile: ModelProfile) -> None:
    plans = draw(replace(profile, accumulation=4), machine(2**28), 12, seed=0)
    assert {plan.accumulation for plan in plans} == {4}
    assert all(0 <= plan.n_device_sum <= plan.n_chunks - plan.n_persist for plan in plans)
    offloaded = [plan for plan in plans if plan.n_persist < plan.n_chunks]
    assert {bool(plan.n_device_sum) for plan in offloaded} == {True, False}
    assert any(plan.n_device_sum == plan.n_chunks - plan.n_persist for plan in offloaded)
    assert {plan.n_device_sum for plan in draw(profile, machine(2**28), 12, seed=0)} == {0}


def test_errors_are_relative_to_what_was_measured(profile: ModelProfile) -> None:
    hardware = machine(2**28)
    plans = draw(profile, hardware, 4, seed=0)
    result = CaseResult(case=SMOKE[0], hardware=hardware, profile=profile, points=())
    predicted = [result.predict(plan) for plan in plans]
    for plan, found, ratio in zip(plans, predicted, (1.0, 1.04, 0.93, 1.25), strict=True):
        result = result.with_point(point(plan, found.step_ms / ratio, device=1.02))
    result = result.with_point(point(plans[0], 1.0, error="OutOfMemoryError: no"))
    errors = errors_of([result])
    assert errors is not None
    assert errors.points == 4
    assert errors.time_within_3 == 0.25
    assert errors.time_within_5 == 0.5
    assert errors.time_within_10 == 0.75
    assert errors.time_worst == pytest.approx(0.25)
    assert errors.device_median == pytest.approx(0.02, abs=1e-3)
    assert errors_of([replace(result, points=())]) is None
    assert "1 of 5 chosen plans ran out of memory" in limits_table([result])
    assert "OutOfMemoryError: no" in limits_table([result])


def test_regret_is_over_the_fastest_that_ran(profile: ModelProfile) -> None:
    hardware = machine(2**28)
    plans = draw(profile, hardware, 3, seed=0)
    result = CaseResult(case=SMOKE[0], hardware=hardware, profile=profile, points=())
    for plan, ms, error in zip(plans, (105.0, 100.0, 1.0), ("", "", "OutOfMemoryError"), strict=True):
        result = result.with_point(point(plan, ms, error=error))
    assert regret(result) == (pytest.approx(0.05), str(plans[1]))
    assert "+5.0% over the fastest of 3" in regret_table([result])
    assert regret(replace(result, points=result.points[2:])) is None


def test_plans_that_are_measured_again_count_without_the_first_run(profile: ModelProfile) -> None:
    plans = draw(profile, machine(2**28), 5, seed=0)
    lucky = dict(zip(map(str, plans), (105.0, 100.0, 90.0, 95.0, 99.0), strict=True))
    usual = lucky | {str(plans[2]): 110.0, str(plans[0]): 102.0}
    first = [point(plan, lucky[str(plan)]) for plan in plans]
    first.append(point(plans[1], 1.0, error="OutOfMemoryError"))

    def measure(plan: Plan | None) -> Point:
        assert plan is not None
        return point(plan, usual[str(plan)])

    repeated = list(again(first, measure, lambda: True))
    assert [plans.index(one.plan) for one in repeated] == [0, 2, 3] * 3, "the chosen one and the two fastest"
    assert [plans.index(one.plan) for one in again(first, measure, iter([True, True, False]).__next__)] == [0, 2]
    assert list(again([replace(first[0], error="no"), *first[1:]], measure, lambda: True)) == []
    result = CaseResult(case=SMOKE[0], hardware=machine(2**28), profile=profile, points=(*first, *repeated))
    assert regret(result) == (pytest.approx(102 / 95 - 1), str(plans[3]))
    assert "+7.4% over the fastest of 5" in regret_table([result])
    barely = regret(replace(result, points=(*first, repeated[0])))
    assert barely is not None
    assert barely[1] == str(plans[2]), "time was up before any other ran again"


def test_descent_finds_the_fastest_neighbour(profile: ModelProfile) -> None:
    """A machine on which time falls with every block that is neither swapped nor checkpointed, and every chunk kept."""
    hardware = machine(2**29)
    measured: list[Plan] = []
    start = draw(profile, hardware, 1, seed=random.Random(1).randint(0, 99))[0]

    def measure(plan: Plan | None) -> Point:
        plan = plan or start
        measured.append(plan)
        return point(plan, 1000.0 + 50 * (plan.n_swap + plan.n_ckpt) - 20 * plan.n_persist)

    found = list(
        descend(profile, hardware, measure, others=0, seed=0, step_during_backward=False, in_time=lambda: True)
    )
    best = min(found, key=lambda one: one.median_ms).plan
    assert (best.n_persist, best.n_swap, best.n_ckpt) == (best.n_chunks, 0, 0)
    assert len({str(plan) for plan in measured}) == len(measured), "nothing is measured twice"
    few = list(descend(profile, hardware, measure, others=5, seed=0, step_during_backward=False, in_time=lambda: False))
    assert len(few) == 1, "time is up: the chosen plan alone"


def test_neighbours_give_way_where_they_do_not_fit(profile: ModelProfile) -> None:
    roomy = machine(2**29)
    n_chunks = draw(profile, roomy, 1, seed=0)[0].n_chunks
    options: dict[str, Any] = {"n_swap": 0, "n_ckpt": 4}
    early = evaluate(profile, roomy, n_persist=1, n_buffer=n_chunks - 1, n_speculate=n_chunks - 1, **options)

    def tried(plan: Plan, hardware: HardwareProfile) -> list[Plan]:
        def measure(other: Plan | None) -> Point:
            return point(other or plan, 1.0 if other is None else 2.0)

        walk = descend(profile, hardware, measure, others=0, seed=0, step_during_backward=False, in_time=lambda: True)
        return [one.plan for one in walk][1:]

    # One more persistent chunk leaves one chunk less to update speculatively. With one persistent chunk less, host
    # memory has no room for as many second copies of all states, but it has for as many of weights alone.
    assert {2} <= {one.n_persist for one in tried(early, roomy)}
    full = replace(roomy, host_bytes=early.host_bytes)
    below = [one for one in tried(early, full) if one.n_persist == 0]
    assert len(below) == 1
    assert below[0].n_weight_only > 0
    weights = [one for one in tried(early, full) if one.n_weight_only and one.n_persist == early.n_persist]
    assert early.n_speculate in {one.n_speculate for one in weights}
    # Where everything is persistent, one chunk less needs a buffer.
    whole = evaluate(profile, roomy, n_persist=n_chunks, n_buffer=0, **options)
    assert n_chunks - 1 in {one.n_persist for one in tried(whole, roomy)}


def test_cases_have_names_of_their_own() -> None:
    for cases in (CASES, ACCUMULATED, REGRET, random_limits(100, seed=0)):
        assert len({case.name for case in cases}) >= len(cases) - 2
    assert {case.held_out for case in CASES} == {True, False}
    assert sum(case.n_plans + 1 for case in CASES) >= 40
    assert replace(SMOKE[0], accumulation=16, compile=True).name == "tiny-4x2x64x16-compiled-64MiB"
    assert sorted({case.accumulation for case in ACCUMULATED}) == [2, 8, 32]


def test_a_folder_without_measurements_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--read", str(tmp_path)])
    assert stop.value.code == 2
    assert f"--read: cannot read Results from {tmp_path / 'planner.json'}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_run_is_recorded_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.planner.__main__.SMOKE", (SMALLEST,))
    monkeypatch.setattr("bench.train.ranks.subprocess", ForkedWorkers())
    assert main(["--steps", "1", "--out", str(tmp_path), "--traces", str(tmp_path / "traces")]) == 0
    results = Results.load(tmp_path / FILES["accuracy"])
    assert len(results.cases[0].points) == 2
    traced = [f"{result.case.name}-{number}.json" for result in results.cases for number in range(len(result.points))]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == sorted(traced)
    assert (tmp_path / "planner.png").stat().st_size > 1000
    capsys.readouterr()
    assert main(["--read", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "time_within_5" in printed
    assert results.cases[0].case.name in printed


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_accumulated_steps_are_recorded_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.planner.__main__.SMOKE", (SMALLEST,))
    monkeypatch.setattr("bench.train.ranks.subprocess", ForkedWorkers())
    assert main(["--kind", "accumulated", "--steps", "1", "--out", str(tmp_path)]) == 0
    assert "time_within_3" in capsys.readouterr().out
    result = Results.load(tmp_path / "planner-accumulated.json").cases[0]
    assert [point.plan.accumulation for point in result.points] == [2, 2]
    assert [point.error for point in result.points] == ["", ""]


def test_accumulated_steps_are_predicted_as_wrap_plans_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device, case = torch.device("cpu"), replace(SMALLEST, accumulation=3, host_memory="64MiB")
    profile = profiled(case, device)
    alone = replace(profile, accumulation=1)
    monkeypatch.setattr("protrain.wrapping.cached_profile", lambda *_, **__: alone)  # a CPU's are measured anew
    training = Training(case, None, device)
    forwards: list[object] = []
    training.model.register_forward_hook(lambda *_: forwards.append(None))
    training.run(2)
    assert len(forwards) == 2 * 3
    plan = training.optimizer.plan
    hardware = detect(device, device_memory=case.device_memory, host_memory=case.host_memory)
    result = CaseResult(case=case, hardware=hardware, profile=profile, points=())
    found = result.predict(plan)
    assert (found.step_ms, found.device_bytes, found.host_bytes) == (plan.step_ms, plan.device_bytes, plan.host_bytes)
    assert found.paper_ms > 2 * replace(result, profile=alone).predict(plan).paper_ms


def test_cases_run_beside_each_other_as_far_as_their_limits_fit() -> None:
    gib = 2**30
    limits = ("9GiB", "3GiB", "3GiB", None, "6GiB", "1GiB")  # and one more each, of the process
    cases = [replace(SMOKE[0], batch=number, device_memory=limit) for number, limit in enumerate(limits)]
    taken = [10 * gib, 4 * gib, 4 * gib, 10 * gib, 7 * gib, 2 * gib]
    lock, running, most = threading.Lock(), set[int](), {"bytes": 0, "jobs": 0}
    together = threading.Barrier(3, timeout=20)

    def run(case: Case) -> int:
        with lock:
            running.add(case.batch)
            most["bytes"] = max(most["bytes"], sum(taken[number] for number in running))
            most["jobs"] = max(most["jobs"], len(running))
        if case.batch in (1, 2, 5):
            together.wait()
        with lock:
            running.remove(case.batch)
        return case.batch * 10

    done = list(beside_each_other(cases, run, jobs=3, device_bytes=10 * gib))
    assert sorted(result for _, result in done) == [0, 10, 20, 30, 40, 50]
    assert all(result == 10 * case.batch for case, result in done)
    assert most == {"bytes": 10 * gib, "jobs": 3}
    for wrong in (["--jobs", "2"], ["--jobs", "2", "--kind", "limits"]):
        with pytest.raises(SystemExit):
            main(wrong)
    with pytest.raises(SystemExit):
        main(["--jobs", "0", "--kind", "limits"])


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_limits_count_what_was_refused_before_it_was_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.planner.__main__.SMOKE", (SMALLEST, replace(SMALLEST, device_memory="1MiB")))
    monkeypatch.setattr("bench.train.ranks.subprocess", ForkedWorkers())
    options = ["--jobs", "2", "--host-memory", "1GiB", "--steps", "1", "--out", str(tmp_path)]
    assert main(["--kind", "limits", *options]) == 0
    assert "0 of 1 chosen plans ran out of memory; for 1 of 2 cases nothing fits" in capsys.readouterr().out
    assert {len(result.points) for result in Results.load(tmp_path / FILES["limits"]).cases} == {0, 1}


@pytest.mark.gpu
def test_the_allocator_refuses_what_a_case_does_not_allow() -> None:
    device = torch.device("cuda")
    try:
        forbid_more("1GiB", device)
        torch.empty(2**29, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, torch.cuda.current_device())


def test_cases_of_regret_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, limits = time.time(), list[float]()

    def run(case: Case, folder: Path, args: Any, until: float) -> tuple[None, str]:
        limits.append(until - begin)
        return None, ""

    monkeypatch.setattr("bench.planner.__main__._run", run)
    monkeypatch.setattr("bench.planner.__main__.SMOKE", SMOKE * 4)
    main(["--kind", "regret", "--time-limit", "1000"])
    main(["--kind", "accuracy", "--time-limit", "1000"])
    main(["--kind", "regret"])
    # Nothing takes any time here, so that more is left for those that follow.
    assert limits[:8] == pytest.approx([250, 1000 / 3, 500, 1000] + [1000] * 4, abs=20)
    assert limits[8:] == [float("inf")] * 4


@pytest.mark.slow
def test_a_point_says_how_many_updates_were_early(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(Window, "is_closed", lambda _: False)  # as if the host were always in time
    case = replace(SMOKE[0], sequence=16)
    chosen = measure(case, None, device, steps=1)
    plan = replace(chosen.plan, n_persist=1, n_buffer=chosen.plan.n_chunks - 1, n_speculate=2)
    point = measure(case, plan, device, steps=1)
    assert point.error == ""
    assert point.early_updates == 2 * 3, "of two steps before the timed one, and of that"
    assert (point.redone_updates, chosen.early_updates) == (0, 0)
