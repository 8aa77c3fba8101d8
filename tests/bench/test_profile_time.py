"""Profiles are timed with the weights that the command says, and the first one apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.planner import profile_time as command
from protrain.cli.models import read_architecture


@pytest.mark.slow
@pytest.mark.usefixtures("imported_once")
def test_a_profile_is_timed_and_kept_when_the_rest_fails(tmp_path: Path) -> None:
    unknown = replace(command.SMOKE[0], shape="no-such-shape")
    with pytest.raises(ValueError, match="no-such-shape"):
        command.main(["--repeat", "2", "--out", str(tmp_path)], (command.SMOKE[0], unknown))
    table = command.Table.load(tmp_path / command.FILE)
    [row] = table.profiled
    assert row.asked == command.SMOKE[0]
    assert row.parameters == sum(parameter.numel() for parameter in read_architecture("tiny").model.parameters())
    assert len(row.profile_s) == 2
    assert min(row.profile_s) > 0
    assert "tiny   0.00 B      2 x 64  0 GiB on the host" in table.table()


@pytest.mark.slow
def test_weights_on_the_host_are_filled_and_stay_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_PIECE_ELEMENTS", 1000)
    model: Any = read_architecture("gpt2", layers=1).model
    tied = model.lm_head.weight is model.transformer.wte.weight
    command._fill(model)
    assert tied
    assert model.lm_head.weight is model.transformer.wte.weight
    for parameter in model.parameters():
        values = parameter.detach().view(-1)
        assert parameter.device.type == "cpu"
        assert torch.isfinite(values).all()
        assert values.float().std() > 0.01
        assert torch.equal(values[-1:], values[(values.numel() - 1) % 1000 :][:1]), "the same over and over"


def test_it_is_profiled_at_least_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--repeat", "0"])
    assert "--repeat must be 1 or more" in capsys.readouterr().err
