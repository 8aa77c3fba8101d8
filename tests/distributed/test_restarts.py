"""torchrun starts all ranks again after one has died, and gives them the store in which the dead ones have met."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import protrain

ROOT = Path(protrain.__file__).parents[1]


def run(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """The weights of a training on two ranks, which torchrun starts again if one dies."""
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with Path(folder, "log").open("w+") as log:
        command = [*torchrun, "-m", "tests.distributed.restarted", str(folder), *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            code: int | None = process.wait(180)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            process.wait()
        log.seek(0)
        assert code == 0, log.read()
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return found


@pytest.mark.slow
def test_a_run_that_torchrun_starts_again_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    undisturbed, restarted = run(tmp_path / "undisturbed"), run(tmp_path / "restarted", "killed")
    assert all(torch.equal(restarted[name], value) for name, value in undisturbed.items())
    assert (tmp_path / "restarted" / "save").is_dir()
