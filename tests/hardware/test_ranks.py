"""Two processes calibrate together, collectives included, as torchrun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protrain.hardware import HardwareProfile
from protrain.hardware.calibration.ranks import MeasuringRanks
from protrain.hardware.profile import Figure

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = "import sys; from protrain.cli.main import main; sys.exit(main(sys.argv[1:]))"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _calibrate_in_two(tmp_path: Path, *options: str) -> list[tuple[str, str]]:
    """Standard output and error of each process."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    environment = {**os.environ, **world, "PROTRAIN_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, "-c", _COMMAND, "calibrate", "--device", "cpu", "--seconds", "0.3", *options]
    processes = [
        subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


def test_two_processes_measure_their_collectives_twice(tmp_path: Path) -> None:
    (out, err), (other_out, other_err) = _calibrate_in_two(tmp_path, "--json", "--repeat-check")
    assert (other_out, "protrain: " in other_err) == ("", False), "one process speaks for all"
    profile = HardwareProfile.from_json(out)
    assert profile.world_size == 2
    for name, rate in (("all_gather", profile.all_gather_gbps), ("reduce_scatter", profile.reduce_scatter_gbps)):
        by_size = {figure.at: figure.median for figure in profile.figures if figure.name == name}
        assert next(iter(by_size)) == "1 MiB"
        assert rate == max(list(by_size.values())[-3:])
        assert 0 < rate < 100, "two processes of one host move less than its memory does"
    kept = list((tmp_path / "cache" / "hardware").iterdir())
    assert [HardwareProfile.load(path) for path in kept] == [profile]
    assert "-x2-" in kept[0].name
    assert f"kept in {kept[0]}" in err
    assert "the two runs differ by more than 5%" in err or "both runs agree within 5%" in err
    assert any("torch uses 1 of the" in line for line in profile.warnings) == (len(os.sched_getaffinity(0)) > 2)


def test_one_process_alone_agrees_with_itself() -> None:
    alone = MeasuringRanks(torch.device("cpu"), 1)
    figures = [Figure(name="h2d", at="", unit="GB/s", median=2.0, p20=1.0, p80=3.0, datasheet=None, mean=1.8)]
    assert alone.slowest(figures) == figures
    assert [alone.agree(said) for said in (True, False)] == [True, False]
    assert alone.union(["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize("local", ["4", None])
def test_processes_of_one_host_share_it(local: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if local is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert MeasuringRanks(torch.device("cpu"), 8).on_this_host == (8 if local is None else 4)
