"""The benchmark of swapped blocks runs, compares like with like, and is recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.swap.__main__ import FILE, Swaps, main
from bench.swap.limits import LIMITS, best_plan
from bench.swap.training import TINY, profiled
from protrain.hardware import detect
from protrain.planning import search

MIB = 1024**2


def test_a_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("it takes minutes on a GPU")
    assert main(["--rounds", "1", "--steps", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    result = Swaps.load(tmp_path / FILE)
    [copies], [limit] = result.copies, result.limits
    assert copies.same_losses
    assert [way.packed for way in copies.ways] == [False, True]
    assert not copies.chosen, "on a CPU"
    assert all(way.measured.plan.n_swap == TINY.layers - 2 for way in copies.ways)
    assert limit.with_swaps.plan.n_swap > 0
    assert limit.without.plan.n_swap == 0
    for measured in (limit.with_swaps, limit.without):
        assert measured.device_bytes <= measured.plan.device_bytes <= limit.limit_bytes
    assert TINY.name in printed
    assert "searched" in printed


def test_the_best_plans_of_either_kind_are_no_worse_than_the_search() -> None:
    device = torch.device("cpu")
    profile = profiled(TINY, device)
    hardware = replace(detect(device, host_memory="1GiB"), device_bytes=10 * MIB)
    plans = [best_plan(profile, hardware, swaps=swaps) for swaps in (True, False)]
    searched = search(profile, hardware)
    assert min(plan.step_ms for plan in plans if plan is not None) <= searched.step_ms * 1.001
    assert best_plan(profile, replace(hardware, device_bytes=MIB), swaps=False) is None


def test_every_limited_case_has_limits() -> None:
    assert all(case.limits for case in LIMITS)
