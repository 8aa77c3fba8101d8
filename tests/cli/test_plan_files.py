"""A plan file drives a run. If it does not suit the model or the machine, the error names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.cli.main import main
from protrain.cli.models import adamw, read_architecture
from protrain.common.errors import PlanError
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Answer, Plan, explain

SHAPE = ["--device", "cpu", "--batch", "2", "--sequence", "32"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main(["plan", "tiny", *SHAPE, "--device-memory", "16MiB", "--json", "--out", str(file)]) == 0
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "more", "said"),
    [
        ({"n_persist": 99}, {}, "n_persist must be 0 to "),
        ({"n_chunks": 99}, {}, "the plan says n_chunks=99, but the model has "),
        ({"model": "0-0"}, {}, "the plan was made for another model than "),
        ({}, {"device_memory": "2MiB"}, "the plan does not fit the "),
        ({}, {"host_memory": "2MiB"}, "the plan does not fit the host memory"),
    ],
)
def test_an_error_says_what_is_wrong_with_a_plan(
    changes: dict[str, Any], more: dict[str, str], said: str, planned: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**json.loads(planned.read_text()), **changes}))
    with pytest.raises((ValueError, protrain.PlanError), match=f"^{said}"):
        _wrap_tiny(file, **more)


def _wrap_tiny(plan: Path, **more: Any) -> ProTrainOptimizer:
    """The model and the batch that ``planned`` is made for."""
    loaded = read_architecture("tiny")
    ids = torch.zeros(2, 32, dtype=torch.int64)
    memory = {"device_memory": "16MiB"} | more
    batch = {"input_ids": ids, "labels": ids}
    plain = adamw(loaded.model)
    return protrain.wrap(loaded.model, plain, example_batch=batch, device="cpu", plan=plan, progress=False, **memory)[1]


def _wrap(plan: Plan | str | os.PathLike[str] | None, **more: Any) -> ProTrainOptimizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.zeros(2, 64),)
    return protrain.wrap(model, optimizer, example_batch=batch, device="cpu", plan=plan, progress=False, **more)[1]


def test_a_plan_or_its_file_is_taken_if_it_fits(tmp_path: Path) -> None:
    plan = _wrap(None).plan
    plan.save(tmp_path / "mine.json")
    for given in (plan, str(tmp_path / "mine.json")):
        assert str(_wrap(given).plan) == str(plan)
        with pytest.raises(PlanError, match=r"^the plan does not fit the") as raised:
            _wrap(given, device_memory=1024)
        assert raised.value.available_bytes == 1024
    with pytest.raises(PlanError, match=r"^no plan fits the"):
        _wrap(None, device_memory=1024)


def test_an_optimizer_explains_its_own_way_of_updating(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(*args: Any, **options: Any) -> Answer:
        asked.append(options)
        return explain(*args, **options)

    monkeypatch.setattr("protrain.optim.optimizer.explain", noted)
    for inside in (False, True):
        _wrap(None, step_during_backward=inside).explain()
    assert asked == [{"step_during_backward": False}, {"step_during_backward": True}]


@pytest.mark.slow
def test_a_plan_feeds_wrap_which_explains_it(planned: Path) -> None:
    optimizer = _wrap_tiny(planned, host_memory="1GiB")
    plan = Plan.load(planned)
    why = optimizer.explain()
    assert why.plan == optimizer.plan
    assert (why.fitting.n_persist, why.fitting.block_modes) == (plan.n_persist, plan.block_modes)
    assert (why.machine.device_bytes, why.machine.host_bytes) == (16 * 1024**2, 1024**3)
