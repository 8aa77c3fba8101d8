"""A plan file of the command drives a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.cli.main import main
from protrain.cli.models import read_architecture
from protrain.cli.trained import adamw
from protrain.planning import Answer, Plan, explain


@pytest.mark.slow
def test_a_plan_feeds_wrap_which_explains_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file, shape = tmp_path / "plan.json", ["--device", "cpu", "--batch", "2", "--sequence", "32"]
    assert main(["plan", "tiny", *shape, "--device-memory", "16MiB", "--json", "--out", str(file)]) == 0
    model, ids = read_architecture("tiny").model, torch.zeros(2, 32, dtype=torch.int64)
    memory: dict[str, Any] = {"device": "cpu", "device_memory": "16MiB", "host_memory": "1GiB"}
    batch = {"input_ids": ids, "labels": ids}
    _, optimizer = protrain.wrap(model, adamw(model), example_batch=batch, plan=file, progress=False, **memory)
    plan, why = Plan.load(file), optimizer.explain()
    assert why.plan == optimizer.plan
    assert (why.fitting.n_persist, why.fitting.block_modes) == (plan.n_persist, plan.block_modes)
    assert (why.machine.device_bytes, why.machine.host_bytes) == (16 * 1024**2, 1024**3)


@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_explains_its_own_way_of_updating(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(*args: Any, **options: Any) -> Answer:
        asked.append(options)
        return explain(*args, **options)

    monkeypatch.setattr("protrain.optim.optimizer.explain", noted)
    model, how = nn.Linear(64, 64), {"device": "cpu", "step_during_backward": inside, "progress": False}
    given = torch.optim.AdamW(model.parameters())
    protrain.wrap(model, given, example_batch=(torch.zeros(2, 64),), **how)[1].explain()  # type: ignore[arg-type]
    assert asked == [{"step_during_backward": inside}]
