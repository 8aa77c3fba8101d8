"""``bench.train --gpus``: contestants on several GPUs, and ranks that fail. On a CPU a rank is a process of gloo."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.train.__main__ import main
from bench.train.contestants import parse
from bench.train.fsdp2 import norm_by_rows, norm_by_torch
from bench.train.launch import supervise
from bench.train.models import build_model, fill, parameter_groups
from bench.train.ranks import together
from bench.train.results import Comparison, Outcome
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Job, Task, make_tokens
from bench.train.trainers import Trainer
from bench.train.worker import train
from tests.bench.forked import ForkedWorkers
from tests.distributed.pool import on_ranks

ONE = parse("fsdp2")
TASK = Task(model="tiny", layers=2, batch=2, sequence=64, steps=3, warm_up=1, gpus=2, chunked_loss=True)


def _plain(task: Task, tokens: torch.Tensor) -> tuple[list[float], list[float]]:
    """Losses of the first rank and norms of every step, of a plain loop over the batches of all ranks."""
    model = build_model(task)
    fill(model, device=torch.device("cpu"), dtype=torch.float32)
    groups = parameter_groups(model, weight_decay=WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, lr=task.learning_rate, betas=BETAS, eps=EPSILON)
    losses, norms = [], []
    for batches in tokens:
        found = []
        for ids in batches:
            loss = model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
            found.append(loss.item())
        losses.append(found[0])
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_ranks_train_on_a_batch_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("bench.train.launch.subprocess", ForkedWorkers())
    names = [
        *("protrain-eager", "floor-eager", "resident-eager"),
        "fsdp2-eager-gathered-prefetched-resident-checkpointed1",
    ]
    options = ["--gpus", "2", "--layers", "2", "--steps", "3", "--warm-up", "1", "--out", str(tmp_path)]
    assert main(["--contestants", ",".join(names), *options]) == 0
    comparison = Comparison.load(tmp_path / "compare-tiny-2layers-2x64-2gpus.json")
    rows = {outcome.contestant.name: outcome for outcome in comparison.outcomes}
    assert list(rows) == names
    assert rows.pop("resident-eager").error == "skipped: resident runs on one GPU here, not on 2"
    assert [outcome.error for outcome in rows.values()] == [""] * 3
    assert comparison.task == replace(TASK, clip_norm=1.0)
    make_tokens(comparison.task, tmp_path / "tokens.pt")
    losses, norms = _plain(comparison.task, torch.load(tmp_path / "tokens.pt"))
    floor = rows.pop("floor-eager")
    assert floor.losses[0] == pytest.approx(losses[0], rel=1e-5)
    for name, outcome in rows.items():
        assert outcome.losses == pytest.approx(losses, rel=1e-5), name
        assert outcome.gradient_norms == pytest.approx(norms, rel=1e-4), name
    config = rows[names[-1]].config
    assert config["checkpointed_blocks"] == "the first 1"
    assert config["blocks_not_offloaded"] == 2
    own = rows["protrain-eager"]
    assert comparison.tokens_per_s(own) == pytest.approx(2 * 2 * 64 / own.median_ms * 1000)
    assert comparison.tflops(own) == pytest.approx(6 * own.parameters * 2 * 64 / own.median_ms * 1000 / 1e12)
    table = capsys.readouterr().out
    assert "tokens/s a GPU" in table
    assert f"  {2 * 64 / own.median_ms * 1000:,.0f}  " in table


def test_the_largest_peaks_of_all_ranks_are_told() -> None:
    first = Outcome(contestant=ONE, step_ms=(5.0,), device_allocated_bytes=7, host_resident_bytes=3)
    second = Outcome(contestant=ONE, step_ms=(6.0,), device_allocated_bytes=6, host_resident_bytes=4)
    assert together([first, second]) == replace(first, host_resident_bytes=4)


def _norms_and_gradients(rank: int) -> list[tuple[float, list[torch.Tensor]]]:
    """The norm by each way of having it, and what it clips the gradients of all ranks to."""
    found: list[tuple[float, list[torch.Tensor]]] = []
    for norm_of in (norm_by_rows, norm_by_torch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))  # shards differ in length, and one is empty
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model(torch.full((3, 7), rank + 1.0)).square().sum().backward()
        norm = norm_of(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        found.append((norm.item(), [gradient.full_tensor() for gradient in gradients]))
    return found


@pytest.mark.xdist_group("ranks")
def test_norms_of_sharded_gradients_are_those_of_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    for rank in (0, 1):
        (model(torch.full((3, 7), rank + 1.0)).square().sum() / 2).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
    for found in on_ranks(2, _norms_and_gradients):
        for norm, gradients in found:
            assert norm == pytest.approx(expected, rel=1e-5)
            for gradient, parameter in zip(gradients, model.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad)


def test_records_of_one_gpu_still_load() -> None:
    task = TASK.to_dict()
    del task["gpus"]
    assert Task.from_json(json.dumps(task)) == replace(TASK, gpus=1)
    assert Task.from_dict(task).label == "tiny-2layers-2x64"
    files = list((Path(__file__).parents[2] / "bench" / "results").rglob("compare-*.json"))
    assert files
    for file in files:
        assert file.stem.startswith(f"compare-{Comparison.load(file).task.model}-")


def test_more_gpus_than_there_are_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SystemExit) as stop:
        main(["--gpus", "3"])
    assert stop.value.code == 2
    assert "--gpus 3: this machine has 2" in capsys.readouterr().err


def _until_one_is_late(rank: int) -> str:
    """The error of a training in which the time of rank 1 alone is up, and every step waits for both ranks."""

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        loss = torch.ones(())
        torch.distributed.all_reduce(loss)
        return loss, None

    job = Job(task=TASK, contestant=ONE, tokens="", planned_by=None, until=0.0 if rank == 1 else time.time() + 99)
    trainer = Trainer(step=step, parameters=5, config={})
    with pytest.raises(RuntimeError) as error:
        train(job, trainer, torch.zeros(4, 1), torch.device("cpu"), lambda *_: None)
    return str(error.value)


@pytest.mark.xdist_group("ranks")
def test_ranks_stop_together_when_the_time_of_one_is_up() -> None:
    assert on_ranks(2, _until_one_is_late) == ["only 0 steps were timed before the time was up"] * 2


# The worker with a trainer whose every step waits for the other rank, and which rank 1 leaves in its second step.
_WORKER = """
import os, subprocess, sys
from pathlib import Path
import torch
from bench.train import worker
from bench.train.ranks import start_group
from bench.train.trainers import Trainer

rank = os.environ["RANK"]
child = subprocess.Popen(["sleep", "300"])
Path(sys.argv[1]).with_name(f"pids{rank}").write_text(f"{os.getpid()} {child.pid}")

def build(*_):
    start_group("gloo")
    taken = []
    def step(ids):
        taken.append(ids)
        if rank == "1" and len(taken) == 2:
            raise MemoryError("no room for another step")
        loss = torch.ones(())
        torch.distributed.all_reduce(loss)
        return loss, None
    return Trainer(step=step, parameters=5, config={})

worker.BUILDERS["fsdp2"] = build
os._exit(worker.main())
"""


@pytest.mark.xdist_group("ranks")
def test_an_error_on_one_rank_is_the_outcome_and_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.train.launch.subprocess", ForkedWorkers())
    make_tokens(TASK, tmp_path / "tokens.pt")
    job = Job(task=TASK, contestant=ONE, tokens=str(tmp_path / "tokens.pt"), planned_by=None, until=time.time() + 99)
    job.save(tmp_path / "job.json")
    command = [sys.executable, "-c", _WORKER, str(tmp_path / "job.json"), str(tmp_path / "out.json")]
    outcome = supervise(command, ONE, tmp_path / "out.json", tmp_path / "log", limit_s=99.0, gpus=2)
    assert outcome.error == "rank 1: MemoryError: no room for another step"
    assert outcome.parameters == 5  # as rank 0 had written before
    assert not _left(tmp_path)


# Rank 0 waits until rank 1 is gone, and then says that it lost the connection, as gloo does.
_RANKS = """
import os, signal, subprocess, sys, time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
child = subprocess.Popen(["sleep", "300"])
(folder / f"new{{rank}}").write_text(f"{{os.getpid()}} {{child.pid}}")
os.replace(folder / f"new{{rank}}", folder / f"pids{{rank}}")
other = folder / f"pids{{1 - int(rank)}}"
while not other.exists():
    time.sleep(0.01)
if rank == "1":
    {ending}
pid = other.read_text().split()[0]
while Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
(folder / "out.json").write_text('{{"contestant": {{"kind": "fsdp2"}}, "error": "the connection is closed"}}')
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("ending", "limit_s", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 60.0, "rank 1: killed (SIGKILL): out of host memory?"),
        ("sys.exit('the driver is gone')", 60.0, "rank 1: exit status 1: the driver is gone"),
        ("os.abort()", 60.0, "rank 1: died of SIGABRT: it said nothing"),
        ("time.sleep(300)", 3.0, "not done within 3 s"),
    ],
    ids=["is killed", "exits", "aborts", "hangs"],
)
def test_a_rank_that_dies_ends_all_of_them(tmp_path: Path, ending: str, limit_s: float, error: str) -> None:
    command = [sys.executable, "-c", _RANKS.format(ending=ending), str(tmp_path)]
    outcome = supervise(command, ONE, tmp_path / "out.json", tmp_path / "log", limit_s=limit_s, gpus=2)
    assert outcome.error == error
    assert not _left(tmp_path)


def _left(folder: Path) -> list[int]:
    """The processes of those that the two ranks have noted that still run, a moment after they were killed."""
    pids = [int(pid) for rank in (0, 1) for pid in (folder / f"pids{rank}").read_text().split()]
    assert len(pids) == 4
    end = time.monotonic() + 5
    while any(_lives(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
