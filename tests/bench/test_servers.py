"""The table of the paper's servers: each model has its fastest batch, with one GPU and with all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.planner import servers as command
from bench.planner.largest import MACHINES
from protrain.cli.models import read_architecture
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import of_machine
from protrain.planning import search


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SEQUENCE", 32)


@pytest.mark.slow
def test_each_model_has_its_fastest_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--shapes", "tiny", "--batches", "1", "4", "--out", str(tmp_path)]) == 0
    result = command.Table.load(tmp_path / command.FILE)
    assert [row.machine for row in result.rows_found] == [machine for machine in MACHINES if machine.gpus == 4]
    layers = read_architecture("tiny").config.num_hidden_layers
    for row in result.rows_found:
        assert row.plan is not None
        assert row.alone is not None
        profiles = {batch: command.profile_of("tiny", layers, batch=batch, sequence=32) for batch in (1, 4)}
        speeds = {
            batch: search(profile, row.machine.hardware(), step_during_backward=True).tokens_per_s
            for batch, profile in profiles.items()
        }
        assert row.batch == max(speeds, key=lambda batch: speeds[batch])
        assert row.plan.tokens_per_s == speeds[row.batch]
        assert row.plan.world_size == 4
        assert row.alone.world_size == 1
        assert row.scaling == row.plan.tokens_per_s / row.alone.tokens_per_s
    printed = capsys.readouterr().out
    for words in ("4 x RTX 3090 24 GB, 384 GiB host", f"{row.scaling:.2f}", "updates inside backward, as in the paper"):
        assert words in printed


def test_a_model_that_fits_no_server_is_shown_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(name: str, n_gpus: int) -> HardwareProfile:
        return replace(of_machine(name, n_gpus), device_bytes=1024**2)

    monkeypatch.setattr("bench.planner.largest.of_machine", small)
    machines = [machine for machine in MACHINES if machine.gpus == 4][:1]
    (row,) = command.rows_of("tiny", (1,), machines)
    assert (row.batch, row.plan, row.alone, row.scaling) == (0, None, None, None)
    assert row.cells(10**10)[-1] == "-"
