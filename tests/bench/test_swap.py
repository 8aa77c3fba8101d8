"""The benchmark of swapped blocks runs, compares like with like, and is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.swap.__main__ import FILE, Swaps, main
from bench.swap.limits import LIMITS
from bench.swap.training import TINY


@pytest.mark.slow
@pytest.mark.usefixtures("profiled_once")
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


def test_every_limited_case_has_limits() -> None:
    assert all(case.limits for case in LIMITS)
