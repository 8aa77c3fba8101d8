"""A checkpoint of several ranks goes to torch.distributed.checkpoint and back, and loses nothing."""

from __future__ import annotations

import shutil
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
from tests.distributed.training import FIRST, SECOND, THIRD, Run, go_on, make
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
    (states, _), *_ = on_ranks(3, go_on, 3, run)
    return request.param, folder, states


def _load(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


@pytest.mark.slow
def test_plain_torch_reads_whole_tensors(saved: Saved, tmp_path: Path) -> None:
    _, folder, expected = saved
    assert convert(folder, tmp_path / "dcp") == tmp_path / "dcp"
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]
    shapes = {name: (p.shape, p.requires_grad) for name, p in make().named_parameters()}
    state: dict[str, Any] = {"model": {name: torch.full(shape, torch.nan) for name, (shape, _) in shapes.items()}}
    state["model"]["mark"] = torch.full((3,), torch.nan)
    trained = {name: shape for name, (shape, is_trained) in shapes.items() if is_trained}
    state["optim"] = {
        "state": {n: {kind: torch.zeros(() if kind == "step" else s) for kind in STATES} for n, s in trained.items()},
        "param_groups": [{"lr": None, "params": None}, {"lr": None, "params": None}],
    }
    _load(tmp_path / "dcp", state)

    for name, shape in trained.items():
        found = {f"{kind}.{name}": state["optim"]["state"][name][kind] for kind in STATES}
        found[f"master.{name}"] = state["model"][name]
        assert_same(found, {key: expected[key].view(value.shape) for key, value in found.items()}, where=str(shape))
    for name in ("enter.bias", "mark"):
        assert torch.equal(state["model"][name], expected[f"model.{name}"].float()), name
    assert {name for group in state["optim"]["param_groups"] for name in group["params"]} == trained.keys()
    assert torch.equal(torch.tensor([group["lr"] for group in state["optim"]["param_groups"]]), expected["lr"])


@pytest.mark.slow
def test_converted_back_it_goes_on_with_the_same_bits(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype, folder, expected = saved
    back = tmp_path / "back"
    assert main(["convert", str(folder), str(tmp_path / "dcp")]) == 0
    assert main(["convert", str(tmp_path / "dcp"), str(back)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "dcp"), str(back / "00001-step-2")]
    final = go_on(0, 1, Run(THIRD, dtype, load=str(folder), after=range(2, 4)))[1]
    for loaded, trained in on_ranks(2, go_on, 2, Run(SECOND, dtype, load=str(back), after=range(2, 4))):
        assert_same(loaded, expected)
        assert_same(trained, final)


def test_extra_states_and_whole_parameters_come_back(tmp_path: Path) -> None:
    model: Any
    other: Any
    model, optimizer = make_counting()
    scale = torch.tensor([float("nan"), -0.0, 3.0]).to(torch.bfloat16)
    states = [{"seen": torch.arange(5), "scale": scale, 3: ("a", b"b", None, True)}, [torch.tensor(2**40), 1.5]]
    model[0].state, model[1][0].state = states
    protrain.save_checkpoint(tmp_path / "save", model, optimizer, extra={"epoch": 3})
    convert(tmp_path / "save", tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "back")
    other, other_optimizer = make_counting()
    with protrain.full_parameters(other), torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert protrain.load_checkpoint(tmp_path / "back", other, other_optimizer) == {"epoch": 3}
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
    assert torch.equal(other[0].state["seen"], torch.arange(5))
    assert other[0].state["scale"].view(torch.int16).equal(scale.view(torch.int16))
    assert other[0].state[3] == ("a", b"b", None, True)
    assert other[1][0].state == states[1]


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
    convert(save, target)
    (piece,) = target.glob("*.distcp")
    piece.write_bytes(piece.read_bytes()[:-2000])
    with pytest.raises(protrain.CheckpointError, match="dcp is damaged: "):
        convert(target, tmp_path / "back")
    shutil.rmtree(target)
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"a": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(target), no_dist=True)
    with pytest.raises(protrain.CheckpointError, match="was not written by `protrain convert`"):
        convert(target, tmp_path / "back")
    file = find_save(tmp_path / "save") / "state-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(protrain.CheckpointError, match="is damaged: its checksum differs"):
        convert(save, tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"save", "dcp", "used"}
