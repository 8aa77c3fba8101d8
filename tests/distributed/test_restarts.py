"""torchrun starts all ranks again after one has died, and gives them the store in which the dead ones have met."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import protrain
from protrain.cli.job import start
from protrain.cli.run_files import JOB_FILE, REFUSED_FILE
from tests.distributed.train_runs import command, outcome

ROOT = Path(protrain.__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    """The weights of a training on two ranks, which torchrun starts again if one dies."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with Path(folder, "log").open("w+") as log:
        torchrun = [*TORCHRUN, "--max-restarts=1", "-m", "tests.distributed.restarted", str(folder), *words]
        process = subprocess.Popen(torchrun, stdout=log, stderr=log, env=environment)
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


def trained(folder: Path, killed_at: int | None = None, *, count: int = 0) -> tuple[int, str]:
    """What `protrain train` on two ranks ends with, which torchrun starts again once: its status and what was said."""
    words = command(
        model="tiny",
        data=folder.parent / "text.txt",
        folder=folder,
        batch=2,
        sequence=16,
        steps=4,
        checkpoint_every=2,
        sample_tokens=4,
        device_memory="64MiB",
        host_memory="1GiB",
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "KILLED_AT": str(killed_at),
    }
    torchrun = [*TORCHRUN, f"--max-restarts={count}", "-m", "tests.distributed.killed_command", *words]
    ended = subprocess.run(torchrun, capture_output=True, text=True, env=environment, timeout=240, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_one_command_starts_a_run_and_goes_on_with_it_after_a_rank_has_died(tmp_path: Path) -> None:
    """At step 1 nothing was saved yet, and at step 3 the first two steps were."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    status, said = trained(tmp_path / "undisturbed")
    assert status == 0, said
    for killed_at, how in {1: "nothing was saved yet: starting at step 1", 3: "resumed at step 2"}.items():
        folder = tmp_path / str(killed_at)
        status, said = trained(folder, killed_at, count=1)
        assert status == 0, said
        assert how in said
        assert outcome(folder) == outcome(tmp_path / "undisturbed")
    status, said = trained(tmp_path / "3", count=1)
    assert status != 0, "a second start by hand, which torchrun repeats"
    assert said.count("holds a run already: continue it with --resume") == 2


def test_only_the_command_of_the_run_goes_on_without_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": "tiny", "seed": 3}
    begun = replace(start(tmp_path, given), dtype="float32", compile=False, micro_batches=2, checkpoint_every=5)
    begun.save(tmp_path / JOB_FILE)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start(tmp_path, given) == begun
    assert start(tmp_path, given | {"dtype": "float32"}) == begun
    for other in ({"model": "tiny"}, given | {"steps": 500}, given | {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="holds a run already"):
            start(tmp_path, other)
        (tmp_path / REFUSED_FILE).unlink()
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    for _ in range(2):
        with pytest.raises(ValueError, match="holds a run already"):
            start(tmp_path, given)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
