"""The benchmark of families records what it trains, and sees what differs from the plain loop."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from torch import Tensor, nn

from bench.families.__main__ import Results, main
from bench.families.check import FORCED, SAME
from bench.families.family import Batch
from bench.families.known import FAMILIES


@pytest.mark.slow
def test_a_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["graph network"]
    assert main([family.name, "--out", str(tmp_path)]) == 0
    [row] = Results.load(tmp_path / "families.json").families
    assert (row.family, row.model, row.blocks) == ("graph network", "Graph", 3)
    assert [trial.verdict for trial in row.trials] == [SAME] * (2 + len(FORCED))
    assert row.trials[0].plan.startswith("n_persist=3/3"), "everything fits"
    assert row.trials[1].plan.startswith("n_persist=0/3"), "nothing more fits"
    assert "1 of 1 families have the bits of the plain loop" in capsys.readouterr().out

    calls = itertools.count(1)

    def drifting(model: nn.Module, batch: Batch) -> Tensor:
        return family.loss(model, batch) * next(calls)

    monkeypatch.setitem(FAMILIES, "LSTM", dataclasses.replace(family, name="LSTM", loss=drifting))
    assert main(["LSTM", "--out", str(tmp_path)]) == 1
    lstm, row = sorted(Results.load(tmp_path / "families.json").families, key=lambda row: row.family)
    assert row.is_same, "the row of the first run is kept"
    assert not any(trial.verdict == SAME for trial in lstm.trials)
    assert lstm.trials[0].verdict.startswith("losses and norms [")


def test_an_unknown_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt5"])
    assert "no such family: gpt5; there are gpt2, " in capsys.readouterr().err
