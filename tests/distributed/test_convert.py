"""A checkpoint of several ranks goes to torch.distributed.checkpoint, and loses nothing that plain torch has."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import protrain
from protrain.checkpoint.dcp import convert
from protrain.checkpoint.manifest import find_save
from protrain.cli.main import main
from tests.checkpoints import make_counting
from tests.distributed.pool import on_ranks
from tests.distributed.saves import FIRST, Outcome, Run, go_on, make
from tests.engine.harness import assert_same

Saved: TypeAlias = tuple[str, Path, dict[str, Tensor]]
STATES = ("exp_avg", "exp_avg_sq", "step")


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Tensor]]:
    """The type of a training, a checkpoint that three ranks have saved, and the states that it has."""
    folder = tmp_path_factory.mktemp(request.param)
    run = Run(FIRST, request.param, save=str(folder), before=range(2))
    outcomes: list[Outcome] = on_ranks(3, go_on, 3, run, timeout_s=200)
    return request.param, folder, outcomes[0].saved


def _load(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


@pytest.mark.slow
def test_plain_torch_reads_whole_tensors(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dtype, folder, expected = saved
    assert main(["convert", str(folder), str(tmp_path / "dcp")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "dcp")]
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]
    shapes = {name: (p.shape, p.requires_grad) for name, p in make().named_parameters()}
    state: dict[str, Any] = {"model": {name: torch.full(shape, torch.nan) for name, (shape, _) in shapes.items()}}
    state["model"]["mark"] = torch.full((3,), torch.nan)
    trained = {name: shape for name, (shape, is_trained) in shapes.items() if is_trained}
    state["optim"] = {
        "state": {n: {kind: torch.zeros(() if kind == "step" else s) for kind in STATES} for n, s in trained.items()},
        "param_groups": [{"lr": None, "params": None}, {"lr": None, "params": None}],
    }
    if dtype == "bfloat16":
        state["weight"] = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in trained.items()}
    _load(tmp_path / "dcp", state)

    for name, shape in trained.items():
        found = {f"{kind}.{name}": state["optim"]["state"][name][kind] for kind in STATES}
        found[f"master.{name}"] = state["model"][name]
        if dtype == "bfloat16":
            found[f"model.{name}"] = state["weight"][name]
        assert_same(found, {key: expected[key].view(value.shape) for key, value in found.items()}, where=str(shape))
    for name in ("enter.bias", "mark"):
        assert torch.equal(state["model"][name], expected[f"model.{name}"].float()), name
    assert {name for group in state["optim"]["param_groups"] for name in group["params"]} == trained.keys()
    assert torch.equal(torch.tensor([group["lr"] for group in state["optim"]["param_groups"]]), expected["lr"])


def test_what_is_no_checkpoint_or_damaged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = make_counting()
    save = protrain.save_checkpoint(tmp_path / "save", model, optimizer)
    target = tmp_path / "dcp"
    with pytest.raises(protrain.CheckpointError, match="does not exist; give the folder"):
        convert(tmp_path / "none", target)
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").touch()
    with pytest.raises(ValueError, match="is not empty: give a folder of its own"):
        convert(save, used)
    file = find_save(tmp_path / "save") / "state-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(protrain.CheckpointError, match="is damaged: its checksum differs"):
        convert(save, target)
    assert {path.name for path in tmp_path.iterdir()} == {"save", "used"}
