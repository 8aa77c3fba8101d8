"""The ablation plans every case with and without each mechanism, and measures the best plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.planner.ablation import FILE, MECHANISMS, TRIAL, Ablation, main
from tests.bench.forked import ForkedWorkers


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU the command measures whole models, which takes minutes a case")
    trial = replace(TRIAL[0], sequence=16)
    monkeypatch.setattr("bench.planner.ablation.TRIAL", (trial,))
    monkeypatch.setattr("bench.planner.ablation.subprocess", ForkedWorkers())
    assert main(["--out", str(tmp_path)]) == 0
    [found] = Ablation.load(tmp_path / FILE).cases
    assert found.case == trial
    for slow in (False, True):
        of_host = {choice.without: choice for choice in found.choices if choice.slow_host is slow}
        assert set(of_host) == {"nothing", *MECHANISMS}
        for mechanism in MECHANISMS:
            assert not getattr(found.plans[of_host[mechanism].plan], mechanism)
        best = of_host["nothing"].plan
        assert min(found.step_ms[best]) > 0
        assert min(found.loaded_ms[best]) > 0
    assert trial.name in capsys.readouterr().out
