"""bench.clients: clients with and without ProTrain, on one and two processes, rows that fail, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from bench.clients.__main__ import PLAIN, PROTRAIN, main
from bench.clients.results import Clients, Row
from bench.clients.run import Client
from bench.clients.worker import CLIENTS
from bench.train.models import build_model, fill
from bench.train.results import Outcome
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY, Task, make_tokens
from tests.bench.forked import ForkedWorkers

OPTIONS = ["--layers", "2", "--steps", "3", "--warm-up", "1"]


def _losses(task: Task, folder: Path) -> list[float]:
    """The losses that the first rank should have, by a plain loop over the batches of all ranks."""
    make_tokens(task, folder / "tokens.pt")
    model = build_model(task)
    fill(model, device=torch.device("cpu"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY
    )
    found = []
    for batches in torch.load(folder / "tokens.pt"):
        losses = [model(input_ids=ids, labels=ids).loss for ids in batches]
        (torch.stack(losses).mean()).backward()
        found.append(losses[0].item())
        nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return found


def _run(
    clients: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str, gpus: int = 1
) -> tuple[int, Clients]:
    monkeypatch.setattr("bench.train.launch.subprocess", ForkedWorkers())
    several = ["--gpus", str(gpus)] if gpus > 1 else []
    status = main(["--clients", clients, *OPTIONS, *several, *options, "--out", str(folder)])
    (file,) = folder.glob("clients-*.json")
    assert file.name.startswith("clients-tiny-2layers-2x64")
    return status, Clients.load(file)


def _check(row: Row, expected: list[float]) -> None:
    assert (row.plain.error, row.protrain.error) == ("", "")
    assert row.plain.plan is None
    assert row.protrain.plan is not None
    for outcome in (row.plain, row.protrain):
        assert outcome.losses == pytest.approx(expected, rel=1e-5)
        assert len(outcome.step_ms) == 3
        assert min(outcome.step_ms) > 0
    assert row.loss_difference == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.xdist_group("clients")
def test_clients_train_as_a_plain_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("transformers", "accelerate", "datasets"):
        pytest.importorskip(package)
    status, result = _run("loop,trainer", tmp_path, monkeypatch)
    assert status == 0
    loop, trainer = result.rows_of_clients
    _check(loop, _losses(result.task, tmp_path))
    # The trainer shuffles the rows, and does not decay vectors.
    assert trainer.plain.losses == pytest.approx(trainer.protrain.losses, rel=1e-5)
    assert len(set(trainer.plain.losses)) == 4
    assert all(2 < loss < 7 for loss in trainer.plain.losses)  # nats of a byte
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 100
    assert f"{2 * 64 / loop.plain.median_ms * 1e3:,.0f} " in table


@pytest.mark.slow
@pytest.mark.xdist_group("clients")
def test_two_processes_train_on_the_batches_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    status, result = _run("loop,accelerate", tmp_path, monkeypatch, gpus=2)
    assert status == 0
    loop, accelerate = result.rows_of_clients
    _check(loop, _losses(result.task, tmp_path))
    # Accelerate gives the first rank every other batch of all rows.
    assert accelerate.plain.losses == pytest.approx(accelerate.protrain.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.xdist_group("clients")
def test_a_client_that_fails_is_a_row_with_its_reason_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(CLIENTS, "sft", Client(train=print, packages=("no_such_one",), lines=""))
    status, result = _run("loop,sft", tmp_path, monkeypatch, "--device-memory", "0.1MiB")
    assert status == 1
    loop, sft = result.rows_of_clients
    assert loop.plain.error == ""
    assert loop.protrain.error.startswith("PlanError: ")
    assert (loop.ratio, loop.loss_difference) == (None, None)
    assert sft.plain.error == sft.protrain.error == "skipped: no_such_one is not installed (pip install no-such-one)"
    table = " ".join(capsys.readouterr().out.split())
    assert "loop, ProTrain: PlanError: " in table
    assert "sft, plain: skipped: no_such_one" in table


def test_figures_of_a_row() -> None:
    task = Task(model="tiny", layers=2, batch=2, sequence=64, steps=3, warm_up=1, gpus=2)
    plain = Outcome(contestant=PLAIN, step_ms=(30.0, 20.0, 40.0), losses=(2.0, 1.0), device_allocated_bytes=3 * 2**30)
    ours = Outcome(contestant=PROTRAIN, step_ms=(20.0, 20.0, 24.0), losses=(2.0, 1.5), device_allocated_bytes=2**30)
    row = Row(client="dpo", plain=plain, protrain=ours, lines=("import protrain", "x"), sequences=2)
    assert (row.ratio, row.loss_difference) == (1.5, 0.5)
    assert row.remarks() == []
    assert row.cells(task) == [
        ["dpo", "plain", "30.0 (24.0 to 36.0)", "17,067", "3.00"],  # 2 GPUs x 2 pairs of 2 x 64 tokens in 30 ms
        ["", "ProTrain", "20.0 (20.0 to 22.4)", "25,600", "1.00", "1.500", "5.0e-01", "2"],
    ]


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["--clients", "keras"], "there is no 'keras'; known: loop, accelerate, fabric"),
        (["--clients", "loop,loop"], "loop is there twice"),
        (["--model", "llama-8t"], "there is no model 'llama-8t'"),
        (["--steps", "2"], "--steps: must be at least 3"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_without_a_gpu_what_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("bench.train.models.available_host_bytes", lambda: 2**30)
    with pytest.raises(SystemExit) as stop:
        main(["--model", "llama-7b"])
    assert stop.value.code == 2
    assert "memory, of which 1 GiB are available: give fewer --layers" in capsys.readouterr().err


def test_the_lines_that_users_add_are_those_of_its_page() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    for client in CLIENTS.values():
        imported = client.lines.splitlines()[0]
        assert imported == "import protrain" or imported in guide
