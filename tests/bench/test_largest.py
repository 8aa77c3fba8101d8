"""The table of largest models: every machine and family, with the paper's figure and all that it assumes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.planner import largest as command
from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load, of_machine
from protrain.planning import search

MIB = 1024**2


def test_hosts_are_the_papers_less_what_a_plan_leaves() -> None:
    for machine in command.MACHINES:
        hardware = machine.hardware()
        assert hardware.world_size == machine.gpus * machine.nodes
        assert hardware.host_bytes == int(machine.host_gib * 1024**3 * 0.9) // machine.gpus
        assert hardware.device_bytes == load(machine.profile).device_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("moment_dtype", "states", "n_machines"), [("float32", 12, 1), ("bfloat16", 8, 2)])
def test_a_table_is_made_of_depths_that_fit(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    moment_dtype: str,
    states: int,
    n_machines: int,
) -> None:

    def small(name: str, n_gpus: int) -> HardwareProfile:
        libraries = 0 if n_gpus == 1 else 600 * MIB  # of NCCL
        return replace(of_machine(name, n_gpus), device_bytes=150 * MIB + libraries)

    monkeypatch.setattr(command, "of_machine", small)
    monkeypatch.setattr(command, "HOST_SHARE", 0.00005)
    monkeypatch.setattr(command, "MACHINES", command.MACHINES[:n_machines])
    monkeypatch.setattr(command, "profile_of", functools.cache(command.profile_of))  # one of each depth
    out = tmp_path / "results"
    options = ["--shapes", "tiny", "--sequence", "32", "--moment-dtype", moment_dtype, "--out", str(out)]
    assert command.main(options) == 0
    result = command.Table.load(out / command.FILES[moment_dtype])
    assert [row.machine for row in result.rows_found] == [machine for machine in command.MACHINES for _ in range(2)]
    assert [row.step_during_backward for row in result.rows_found] == [False, True] * len(command.MACHINES)
    assert result.assumptions[0].startswith(f"{states} bytes a parameter: bfloat16 weight")
    assert f"two moments in {moment_dtype};" in result.assumptions[0]
    size: dict[str, Any] = {"batch": 1, "sequence": 32, "moment_dtype": moment_dtype}
    for row in result.rows_found:
        hardware, inside = row.machine.hardware(), row.step_during_backward
        layers = row.found.layers
        search(command.profile_of("tiny", layers, **size), hardware, step_during_backward=inside)
        with pytest.raises(PlanError):
            search(command.profile_of("tiny", layers + 1, **size), hardware, step_during_backward=inside)
    printed = capsys.readouterr().out
    figures = (("1 x RTX 3090 24 GB, 384 GiB host", "34 B"), ("4 x RTX 3090 24 GB, 384 GiB host", "37 B"))
    for words in (
        *(words for machine in figures[:n_machines] for words in machine),
        f"{states} bytes a parameter",
        "inside backward",
        "batch 1 x 32 tokens on each GPU",
    ):
        assert words in printed
