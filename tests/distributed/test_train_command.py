"""`protrain train` on several ranks: the files of one process, one that speaks, and an end together."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch

import protrain.cli.finish
import protrain.cli.loop
from protrain.checkpoint.manifest import list_saves
from protrain.cli.job import TrainJob
from protrain.cli.main import main
from protrain.cli.run_files import LOCK_FILE
from protrain.cli.training_run import Run
from protrain.distributed.joining import announced_by_slurm
from protrain.planning import Plan
from tests.distributed.pool import on_ranks
from tests.distributed.train_runs import LaunchedRanks, command, outcome

transformers = pytest.importorskip("transformers")

STEPS = 4


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a small model, which drops out a tenth of its activations."""
    folder = tmp_path_factory.mktemp("gpus")
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.1
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "source")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return folder


def arguments(workplace: Path, folder: Path, **more: Any) -> list[str]:
    data = {"model": workplace / "source", "data": workplace / "text.txt", "folder": folder}
    return command(**{**data, "batch": 2, "sequence": 32, "steps": STEPS, "sample_tokens": 4, **more})


@pytest.fixture(scope="module")
def six(workplace: Path) -> Path:
    """The run of one process with six batches in a step."""
    folder = workplace / "six"
    assert main(arguments(workplace, folder, accumulation=6)) == 0
    return folder


def run_command(words: Sequence[str]) -> None:
    """Run the command as ``python -m protrain`` does."""
    sys.exit(main(words))


def test_the_number_of_gpus_changes_no_bit(
    workplace: Path, six: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LaunchedRanks(run_command, tmp_path)
    monkeypatch.setattr("protrain.cli.launch.subprocess", ranks)
    folder = workplace / "two"
    assert main(arguments(workplace, folder, accumulation=3, gpus=2)) == 0
    expected, found = outcome(six), outcome(folder)
    assert len({row.get("loss") for row in expected["rows"]}) > STEPS, "it trains"
    assert found == expected
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["gpus"], summary["accumulation"], summary["tokens_per_step"]) == (2, 3, 6 * 2 * 32)
    printed = [*capfd.readouterr().err.splitlines(), *ranks.said()]
    assert [line.split()[0] for line in printed if "  loss " in line] == ["1/4", "4/4"]
    assert len([line for line in printed if line.startswith("loss ")]) == 1
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in six.iterdir())
    assert ranks.are_gone()


@pytest.mark.slow
def test_the_command_starts_processes_of_which_one_speaks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """These are real ones. They refuse the run as soon as they have found each other."""
    TrainJob(model="tiny", device="cpu", micro_batches=3).save(tmp_path / "job.json")
    with pytest.raises(SystemExit) as end:
        main(["train", "--resume", "--folder", str(tmp_path), "--gpus", "2"])
    assert end.value.code == 2
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("protrain train: ")]
    assert "has 3 batches, of which 2 GPUs cannot have equally many" in error
    assert not children_that_run()


def train_as_rank(rank: int, command: list[str]) -> tuple[int, list[str]]:
    """Run the command as one of the ranks. Returns its status and what it said at the end."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            status = main(command)
    except SystemExit as end:
        status = int(end.code or 0)
    return status, said.getvalue().splitlines()


@pytest.mark.slow
def test_three_ranks_share_six_batches(workplace: Path, six: Path) -> None:
    folder = workplace / "three"
    command = arguments(workplace, folder, accumulation=2, device_memory="1500KiB")
    answers = on_ranks(3, train_as_rank, command)
    assert [status for status, _ in answers] == [0, 0, 0], answers
    assert [bool(said) for _, said in answers] == [True, False, False], "one speaks"
    assert outcome(folder) == outcome(six)
    plan = Plan.load(folder / "plan.json")
    assert plan.world_size == 3
    assert plan.n_persist < plan.n_chunks, "some states live in host memory"


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(workplace: Path, six: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    again = ["train", "--resume", "--folder", str(folder), "--checkpoint-every", "1"]
    started = on_ranks(3, train_as_rank, arguments(workplace, folder, accumulation=2, checkpoint_every=2))
    assert [status for status, _ in started] == [0, 0, 0], started
    lose_what_followed(folder, step=2)
    assert main(again) == 0
    assert outcome(folder) == outcome(six)
    lose_what_followed(folder, step=3)
    resumed = on_ranks(3, train_as_rank, again)
    assert [status for status, _ in resumed] == [0, 0, 0], resumed
    assert "resumed at step 3" in resumed[0][1]
    assert outcome(folder) == outcome(six)


def lose_what_followed(folder: Path, *, step: int) -> None:
    """Leave the run as if it had been killed after the save at ``step``."""
    for save in list_saves(folder / "checkpoints"):
        if int(save.name.rpartition("-")[2]) > step:
            shutil.rmtree(save)
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    assert list_saves(folder / "checkpoints")[-1].name.endswith(f"-{step}")


def test_batches_that_ranks_cannot_share_are_refused(workplace: Path, tmp_path: Path) -> None:
    TrainJob(model=str(workplace / "source"), device="cpu", micro_batches=4).save(tmp_path / "job.json")
    answers = on_ranks(3, train_as_rank, ["train", "--resume", "--folder", str(tmp_path)])
    assert sorted(status for status, _ in answers) == [1, 1, 2]
    (error,) = [line for _, said in answers for line in said]
    assert error == (
        f"protrain train: a step of the run in {tmp_path} has 4 batches, of which 3 GPUs cannot have equally many: "
        "resume it with one of these numbers of --gpus: 1, 2, 4"
    )


@pytest.mark.slow
def test_a_stop_is_passed_on_and_all_end_after_the_same_step(
    workplace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LaunchedRanks(run_command, tmp_path)
    monkeypatch.setattr("protrain.cli.launch.subprocess", ranks)
    folder = tmp_path / "run"

    def stop() -> None:
        rows = folder / "metrics.jsonl"
        while not rows.exists() or '"step": 3,' not in rows.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)  # to the launcher alone

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(SystemExit) as end:
        main(arguments(workplace, folder, gpus=2, steps=100_000))
    assert end.value.code == 128 + signal.SIGTERM
    step = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert [save.name.rpartition("-")[2] for save in list_saves(folder / "checkpoints")] == [str(step)]
    again = f"stopped at step {step} of 100000; continue with: protrain train --resume --folder {folder}"
    lines = [*capfd.readouterr().err.splitlines(), *ranks.said()]
    assert [line for line in lines if line.startswith("protrain train: ")] == [f"protrain train: {again}"]
    assert ranks.are_gone()


@pytest.mark.slow
def test_the_ranks_of_a_killed_launcher_save_and_end(workplace: Path, tmp_path: Path) -> None:
    folder, rows = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    words = [sys.executable, "-m", "protrain", *arguments(workplace, folder, gpus=2, steps=100_000)]
    with open(tmp_path / "said", "w") as said, subprocess.Popen(words, stdout=said, stderr=said) as launcher:
        try:
            while not rows.exists() or '"step": 3,' not in rows.read_text():
                assert launcher.poll() is None
                time.sleep(0.02)
            ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        finally:
            launcher.kill()
    assert len(ranks) == 2
    end_s = time.monotonic() + 60
    while (left := [int(rank) for rank in ranks if is_running(int(rank))]) and time.monotonic() < end_s:
        time.sleep(0.05)
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert not left
    step = json.loads(rows.read_text().splitlines()[-1])["step"]
    assert [save.name.rpartition("-")[2] for save in list_saves(folder / "checkpoints")] == [str(step)]
    assert f"stopped at step {step} of 100000" in (tmp_path / "said").read_text()


def is_running(process: int) -> bool:
    """Whether there is such a process that has not ended. One that has may have nobody who asks for its status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_that_run() -> list[str]:
    """The commands of this process's children that train."""
    found = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    return [command for command in found if "-m protrain train" in command]


def run_and_fail_on_one_rank(words: Sequence[str]) -> None:
    """Run the command, with a disk of rank 1 that is gone at the third step."""
    if os.environ["RANK"] == "1":
        batch = protrain.cli.loop.training_batch

        def training_batch(*args: Any, step: int, **more: Any) -> Any:
            if step == 2:
                raise ValueError("--data: the disk of this rank is gone")
            return batch(*args, step=step, **more)

        protrain.cli.loop.training_batch = training_batch
    sys.exit(main(words))


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all_with_one_message(
    workplace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = LaunchedRanks(run_and_fail_on_one_rank, tmp_path)
    monkeypatch.setattr("protrain.cli.launch.subprocess", ranks)
    with pytest.raises(SystemExit) as end:
        main(arguments(workplace, tmp_path / "run", gpus=2))
    assert end.value.code == 2
    lines = [*capfd.readouterr().err.splitlines(), *ranks.said()]  # libraries may say something, too
    said = [line for line in lines if line.startswith("protrain train: ") or "Traceback" in line]
    assert said == ["protrain train: --data: the disk of this rank is gone"]
    assert not (tmp_path / "run" / LOCK_FILE).exists()
    assert ranks.are_gone()


def train_and_stop(rank: int, command: list[str]) -> tuple[int, list[str]]:
    """``train_as_rank``, where the last rank alone is told to stop after the last step."""
    sample = protrain.cli.finish.sample

    def stop(run: Run) -> str:
        if rank == run.ranks.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return sample(run)

    protrain.cli.finish.sample = stop
    try:
        return train_as_rank(rank, command)
    finally:
        protrain.cli.finish.sample = sample


@pytest.mark.slow
def test_a_stop_of_one_rank_after_the_last_step_is_one_of_all(workplace: Path, six: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    answers = on_ranks(3, train_and_stop, arguments(workplace, folder, accumulation=2))
    assert [status for status, _ in answers] == [128 + signal.SIGTERM] * 3, answers
    again = f"stopped at step {STEPS} of {STEPS}; continue with: protrain train --resume --folder {folder}"
    assert [line for _, said in answers for line in said if "stopped" in line] == [f"protrain train: {again}"]
    assert not (folder / "summary.json").exists()
    assert main(["train", "--resume", "--folder", str(folder)]) == 0
    assert outcome(folder) == outcome(six)


# -- launchers ---------------------------------------------------------------------------------------------------------

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[3-5]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.3",
}


def test_a_task_of_slurm_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without scontrol
    expected = {
        "RANK": "9",
        "WORLD_SIZE": "10",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.3",
        "MASTER_PORT": str(20_000 + 7 * 31 + 2),
    }
    assert announced_by_slurm(TASK) == expected
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node3; echo node4; echo node5\n")
    scontrol.chmod(0o755)
    assert announced_by_slurm(TASK) == {**expected, "MASTER_ADDR": "node3"}
    assert announced_by_slurm({**TASK, "MASTER_ADDR": "head"}) == {**expected, "MASTER_ADDR": "head"}
    alone = {**TASK, "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    assert announced_by_slurm(alone)["MASTER_ADDR"] == "127.0.0.1"
    scontrol.unlink()
    unknown = {name: value for name, value in TASK.items() if name != "SLURM_LAUNCH_NODE_IPADDR"}
    with pytest.raises(ValueError, match="set MASTER_ADDR to the first node"):
        announced_by_slurm(unknown)


def test_who_is_no_task_of_several_is_alone() -> None:
    script = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}  # runs once, whatever it asks for
    for environment in (script, {**TASK, "SLURM_NTASKS": "1"}, {**TASK, "WORLD_SIZE": "2", "RANK": "0"}, {}):
        assert announced_by_slurm(environment) == {}
