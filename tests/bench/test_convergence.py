"""The comparison of how moments converge: every kind from every seed, with what makes the kinds differ."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import protrain
from bench import convergence
from protrain.cli.models import read_architecture
from tests.engine import residual
from tests.engine.harness import Loop, adamw

OPTIONS = ["--steps", "2", "--batch", "1", "--sequence", "16", "--seeds", "2"]


@pytest.mark.slow
def test_the_record_has_every_run_and_says_how_far_kinds_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "read_architecture", partial(read_architecture, layers=1))
    monkeypatch.setattr(convergence, "_HELD_OUT", 2)
    assert convergence.main([*OPTIONS, "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "convergence.json").read_text())
    assert record["command"] == f"python -m bench.convergence {' '.join(OPTIONS)} --out {tmp_path}"
    runs = {(run["seed"], run["kind"]): run for run in record["runs"]}
    assert set(runs) == {(seed, kind) for seed in (0, 1) for kind in convergence.KINDS}
    for seed in (0, 1):
        losses = [runs[seed, kind]["losses"] for kind in convergence.KINDS]
        assert losses[0][0] == losses[1][0] == losses[2][0], "other weights or batches"
        assert "moments=bfloat16" in runs[seed, "bfloat16"]["plan"]
        assert "moments" not in runs[seed, "float32"]["plan"]
    assert runs[0, "float32"]["losses"][0] != runs[1, "float32"]["losses"][0]
    for kind in convergence.KINDS[1:]:
        both = [runs[seed, kind]["held_out"] - runs[seed, "float32"]["held_out"] for seed in (0, 1)]
        assert record["beyond_float32"][kind]["mean"] == pytest.approx(sum(both) / 2)
        assert record["beyond_float32"][kind]["standard_error"] == pytest.approx(abs(both[0] - both[1]) / 2)
    assert (tmp_path / "convergence.png").stat().st_size > 1000


def test_the_control_rounds_every_moment_to_the_nearest() -> None:
    data, model = residual.batches(2), residual.make()
    wrapped, optimizer = protrain.wrap(model, adamw(model), example_batch=data[0], device="cpu", progress=False)
    Loop().run(wrapped, optimizer, data)
    before = {name: optimizer.export_parameter(name) for name in optimizer.parameter_names()}
    convergence.to_nearest(optimizer)
    for name, state in before.items():
        after = optimizer.export_parameter(name)
        assert torch.equal(after["master"], state["master"])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after[moment], state[moment].bfloat16().float())
            assert not torch.equal(after[moment], state[moment])
