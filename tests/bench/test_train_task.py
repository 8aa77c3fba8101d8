"""bench.train: the loss and the positions that the task asks for, in every contestant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.train.contestants import parse
from bench.train.models import build_model, fill, replace_loss
from bench.train.peers import outputs_kept
from bench.train.results import Outcome
from bench.train.task import Job, Task
from bench.train.worker import BUILDERS
from protrain.cli.shapes import SHAPES
from protrain_kernels import linear_cross_entropy

CPU = torch.device("cpu")
TASK = Task(model="untied", layers=2, batch=1, sequence=24, steps=3, warm_up=1, learning_rate=1e-3)
IDS = torch.randint(256, (3, 1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _untied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of its own, as in the large shapes: its weight is gathered for nothing else."""
    monkeypatch.setitem(SHAPES, "untied", replace(SHAPES["tiny"], tied=False))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of every loss that is computed in pieces."""
    calls: list[int] = []

    def counted(hidden: torch.Tensor, *others: Any, **options: Any) -> Any:
        calls.append(len(hidden))
        return linear_cross_entropy(hidden, *others, **options)

    monkeypatch.setattr("protrain.forward.chunked_loss.linear_cross_entropy", counted)
    yield calls
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _train(
    name: str, task: Task, planned_by: str | None, steps: torch.Tensor = IDS
) -> tuple[list[float], list[float], dict[str, Any]]:
    """(losses, gradient norms, configuration) of three steps."""
    job = Job(task=task, contestant=parse(name), tokens="", planned_by=planned_by, until=0.0)
    torch.manual_seed(0)
    trainer = BUILDERS[job.contestant.kind](job, CPU, steps[0, : task.batch])
    if trainer.plan is not None and planned_by is not None:
        Outcome(contestant=job.contestant, plan=trainer.plan).save(planned_by)
    results = [trainer.step(ids) for ids in steps]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return [loss.item() for loss, _ in results], [float(n) for _, n in results if n is not None], trainer.config


@pytest.mark.slow
def test_every_contestant_has_the_chunked_loss_and_trains_the_same(tmp_path: Path, chunks: list[int]) -> None:
    plan = str(tmp_path / "protrain-eager.json")
    chunked = replace(TASK, chunked_loss=True)
    for name in ("protrain-eager", "floor-eager", "resident-eager", "fsdp2-eager", "fsdp2-eager-kept"):
        usual = _train(name, TASK, plan)
        assert not chunks, name
        ours = _train(name, chunked, plan)
        assert chunks[-3:] == [24] * 3, name
        chunks.clear()
        assert ours[:2] == (pytest.approx(usual[0], rel=1e-5), pytest.approx(usual[1], rel=1e-3)), name
        assert (usual[2]["chunked_loss"], ours[2]["chunked_loss"]) == (False, True)


@pytest.mark.slow
def test_a_step_of_several_batches_is_the_same_of_every_contestant(tmp_path: Path) -> None:
    steps = torch.randint(256, (3, 2, 24), generator=torch.Generator().manual_seed(1))
    once = _train("resident-eager", replace(TASK, batch=2), None, steps)
    for name in ("protrain-eager", "resident-eager", "fsdp2-eager", "fsdp2-eager-prefetched2-summed"):
        losses, norms, _ = _train(name, replace(TASK, accumulation=2), str(tmp_path / "plan.json"), steps)
        assert losses == pytest.approx(once[0], rel=1e-5), name
        assert norms == pytest.approx(once[1], rel=1e-4), name


def test_a_head_whose_hooks_replace_its_output_still_hands_on_the_loss(chunks: list[int]) -> None:
    losses = []
    for kept in (True, False):
        torch.manual_seed(0)
        model = build_model(TASK)
        replace_loss(model, replace(TASK, chunked_loss=kept))
        fill(model, device=CPU, dtype=torch.float32)
        if kept:
            with outputs_kept(model.lm_head):
                model.lm_head.register_forward_hook(lambda module, inputs, output: output.detach())  # as ZeRO-3 does
        losses += [model(input_ids=ids, labels=ids).loss.item() for ids in IDS[:2]]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)
    assert len(chunks) == 2


def test_rotary_models_have_the_positions_that_the_task_needs_and_compute_the_same() -> None:
    logits = []
    for sequence, positions in ((16, 1024), (1500, 1500)):
        torch.manual_seed(0)
        model = build_model(replace(TASK, sequence=sequence))
        assert model.config.max_position_embeddings == positions
        fill(model, device=CPU, dtype=torch.float32)
        logits.append(model(input_ids=IDS[0]).logits)
    assert torch.equal(*logits)
    job = Job(
        task=replace(TASK, layers=1, sequence=1500),
        contestant=parse("resident-eager"),
        tokens="",
        planned_by=None,
        until=0.0,
    )
    trainer = BUILDERS["resident"](job, CPU, IDS[0])
    assert trainer.config["max_position_embeddings"] == 1500
    trainer.step(torch.randint(256, (1, 1500)))
