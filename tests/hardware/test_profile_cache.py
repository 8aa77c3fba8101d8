"""Calibrated profiles are found again on the machine that they were measured on, and nowhere else."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.cli.main import main
from protrain.common.cache import cache_folder
from protrain.hardware.cache import Machine, cached, store, why_not_cached
from protrain.hardware.calibration import calibrate
from protrain.hardware.detection import assume, detect
from protrain.hardware.profile import HardwareProfile

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PROTRAIN_CACHE")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "protrain" / "hardware"


def _measured(machine: Machine) -> HardwareProfile:
    return replace(assume(CPU), source="measured", host_adam_gparams=0.123, **vars(machine))


@pytest.mark.slow
def test_detect_goes_by_what_was_calibrated_last(cache: Path) -> None:
    assert detect("cpu").source == "detected"
    first = calibrate("cpu", seconds=0.02, save=False)
    assert not cache.exists()
    second = calibrate("cpu", seconds=0.02)
    assert [name for name, _ in first.rows()] == [name for name, _ in second.rows()]
    assert first.matmul_tflops != second.matmul_tflops
    assert len(list(cache.iterdir())) == 1
    found = detect("cpu", device_memory="24MiB")
    assert (found.source, found.contention) == ("measured", second.contention)
    assert found.host_adam_gparams == second.host_adam_gparams
    assert found.device_bytes == 24 * 1024**2, "sizes are those of now"


OTHERS: dict[str, Any] = {
    **{"name": "NVIDIA B300", "driver": "999.1", "torch_version": "2.99.0", "world_size": 2, "processor": "another"},
    **{"nccl_p2p": "NCCL_P2P_DISABLE=1", "cpu_threads": 1024, "method": 1},
}


@pytest.mark.parametrize("field", OTHERS)
def test_another_machine_is_not_this_one(field: str, cache: Path) -> None:
    here = Machine.of(CPU)
    other = replace(here, **{field: OTHERS[field]})
    store(_measured(other), other)
    assert len(list(cache.iterdir())) == 1
    assert cached(CPU) is None
    mine = _measured(here)
    store(mine, here)
    assert cached(CPU) == mine


def test_a_trial_replaces_no_kept_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rates = iter((1.0, 2.0, 3.0))

    def measure(device: torch.device, *, save: bool, **_: object) -> HardwareProfile:
        here = Machine.of(device)
        profile = replace(_measured(here), host_adam_gparams=next(rates))
        if save:
            store(profile, here)
        return profile

    def kept_rate(seconds: str) -> float:
        assert main(["calibrate", "--device", "cpu", "--seconds", seconds]) == 0
        found = cached(CPU)
        assert found is not None
        return found.host_adam_gparams

    monkeypatch.setattr("protrain.calibrate", measure)
    assert kept_rate("5") == 1.0, "without any, a rough one is better"
    said = capsys.readouterr().err
    assert f"kept in {Machine.of(CPU).path}, for plans and runs with --device cpu alone" in said
    assert kept_rate("5") == 1.0
    assert "not kept, because there is one already, and in less than 30 s" in capsys.readouterr().err
    assert kept_rate("30") == 3.0


def test_it_is_said_why_the_last_calibration_does_not_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_cached(CPU) is None
    here = Machine.of(CPU)
    old = replace(here, torch_version="2.0.1", driver="470.57")
    store(_measured(old), old)
    said = (
        f"{old.path}, is of another machine or software: driver was '470.57' and is 'none', torch_version was '2.0.1'"
    )
    assert said in str(why_not_cached(CPU))
    assert main(["plan", "tiny", "--device", "cpu", "--batch", "1", "--sequence", "16"]) == 0
    captured = capsys.readouterr()
    assert said in captured.err
    assert "rates assumed" in captured.out
    os.utime(old.path, (0, 0))
    of_the_future = json.dumps({**_measured(here).to_dict(), "of_the_future": 1})
    for unreadable in ("{", of_the_future):
        here.path.write_text(unreadable)
        assert f"cannot be used: {here.path} is not a hardware profile" in str(why_not_cached(CPU))
        assert cached(CPU) is None
        assert detect("cpu").source == "detected"
    store(_measured(here), here)
    monkeypatch.setenv("PROTRAIN_CACHE", "0")
    assert why_not_cached(CPU) is cached(CPU) is None
    here.path.unlink()
    store(_measured(here), here)
    assert not here.path.exists()


def test_a_home_that_cannot_be_written_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path / "file" / "inside"))
    here = Machine.of(CPU)
    with pytest.warns(RuntimeWarning, match="file/inside cannot be written .* let PROTRAIN_CACHE name a folder"):
        store(_measured(here), here)
    assert cached(CPU) is None


def test_the_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for named, folder in (("0", "protrain"), ("1", "protrain"), ("", "protrain"), (str(tmp_path / "mine"), "mine")):
        monkeypatch.setenv("PROTRAIN_CACHE", named)
        assert cache_folder() == tmp_path / folder
    monkeypatch.delenv("PROTRAIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "protrain"
