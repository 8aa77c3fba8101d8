"""A load names what it refuses, with a remedy, before anything has changed."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from protrain.checkpoint.loading import load_checkpoint
from protrain.checkpoint.manifest import MANIFEST, list_saves
from protrain.checkpoint.saving import save_checkpoint
from protrain.common.errors import CheckpointError
from tests.checkpoints import make_counting, make_expanded, make_model, make_run, plain_optimizer, rewrite, train


def _sequential(then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda inner: schedulers.SequentialLR(inner, [schedulers.ConstantLR(inner), then(inner)], [2])


def _steps(inner: Any) -> Any:
    return schedulers.StepLR(inner, 2)


def _lambda(inner: Any) -> Any:
    return schedulers.LambdaLR(inner, lambda step: 1 / (step + 1))


def _exponential(inner: Any) -> Any:
    return schedulers.ExponentialLR(inner, 0.9)


def _one_cycle(inner: Any) -> Any:
    return schedulers.OneCycleLR(inner, 0.1, total_steps=9)


@pytest.mark.parametrize(
    ("saved", "given", "words"),
    [
        (_steps, _lambda, "StepLR, and LambdaLR was given"),
        (_lambda, _sequential(_steps), r"LambdaLR, and SequentialLR\(ConstantLR, StepLR\) was given"),
        (_lambda, _one_cycle, "LambdaLR, and OneCycleLR was given"),
        (_sequential(_steps), _sequential(_exponential), r".*, StepLR\), and .*, ExponentialLR\) was given"),
        (_sequential(_lambda), _sequential(_lambda), ""),
    ],
)
def test_another_scheduler_is_refused(tmp_path: Path, saved: Any, given: Any, words: str) -> None:
    model, optimizer, _ = make_run(0)
    save = save_checkpoint(tmp_path, model, optimizer, scheduler=saved(optimizer.inner))
    other, other_optimizer, _ = make_run(1)
    scheduler = given(other_optimizer.inner)
    if not words:
        load_checkpoint(tmp_path, other, other_optimizer, scheduler=scheduler)
        return
    before, position = other.state_dict()["0.weight"].clone(), scheduler.state_dict()
    with pytest.raises(CheckpointError, match=f"{save} holds the state of {words}; pass the scheduler it was saved"):
        load_checkpoint(tmp_path, other, other_optimizer, scheduler=scheduler)
    assert other.state_dict()["0.weight"].equal(before)
    assert scheduler.state_dict() == position


def _flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda save: (save / "state-00001.safetensors").unlink(), "state-00001.safetensors is missing"),
        (lambda save: os.truncate(save / "state-00001.safetensors", 100), "has 100 bytes instead of"),
        (lambda save: _flip(save / "state-00001.safetensors"), "state-00001.safetensors is damaged: its checksum"),
        (lambda save: _flip(save / "buffers.safetensors"), "buffers.safetensors is damaged: its checksum"),
        (lambda save: _flip(save / "state-00001.safetensors", at=7), "state-00001.safetensors is damaged: "),
        (lambda save: (save / MANIFEST).write_text('{"format": 4'), "checkpoint.json is damaged"),
        (lambda save: (save / MANIFEST).write_text('{"format": 4}'), "checkpoint.json is damaged: its checksum"),
        (lambda save: (save / MANIFEST).unlink(), "checkpoint.json is missing"),
    ],
)
def test_damage_is_named_before_anything_changes(tmp_path: Path, damage: Any, message: str) -> None:
    model, optimizer, scheduler = make_run(0)
    for _ in range(2):
        train(model, optimizer, scheduler, 1)
        save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    train(model, optimizer, scheduler, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    damage(tmp_path / "00002-step-2")
    with pytest.raises(CheckpointError, match=message) as raised:
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert str(tmp_path / "00002-step-2") in str(raised.value)
    assert "00001-step-1" in str(raised.value), "the remedy names the older save"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load_checkpoint(tmp_path / "00001-step-1", model, optimizer, scheduler=scheduler)


def test_a_save_of_a_newer_version_is_not_to_be_deleted(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    for _ in range(2):
        save_checkpoint(tmp_path, model, optimizer)
    (list_saves(tmp_path)[-1] / MANIFEST).write_text('{"format": 5}')
    words = "has format 5, and this version of ProTrain reads format 4: load it with the version that wrote it"
    with pytest.raises(CheckpointError, match=words) as raised:
        load_checkpoint(tmp_path, model, optimizer)
    assert "delete" not in str(raised.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [MANIFEST, "buffers.safetensors"])
def test_what_cannot_be_read_is_not_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    model, optimizer, _ = make_run(0)
    for _ in range(2):
        save_checkpoint(tmp_path, model, optimizer)
    unreadable = list_saves(tmp_path)[-1] / name
    opened = io.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if path == unreadable:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    for module in (io, builtins):  # Path.open uses the first; root may read everything, whatever its mode
        monkeypatch.setattr(module, "open", refuse)
    with pytest.raises(CheckpointError, match=f"cannot read {unreadable}: {os.strerror(number)}") as raised:
        load_checkpoint(tmp_path, model, optimizer)
    assert "delete" not in str(raised.value)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_checkpoint(tmp_path / "nowhere", model, optimizer)
    (tmp_path / "run" / "checkpoints" / "00001-step-4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="run holds no checkpoint; give the folder"):
        load_checkpoint(tmp_path / "run", model, optimizer)
    with pytest.raises(CheckpointError, match="holds no checkpoint; give the folder that save_checkpoint wrote to"):
        load_checkpoint(tmp_path, model, optimizer)


def test_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    train(model, optimizer, scheduler, 1)
    save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="the state of no scheduler, and MultiStepLR was given"):
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    deeper = nn.Sequential(*model, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"lacks the parameter '4.bias', which the model has"):
        load_checkpoint(tmp_path, deeper, plain_optimizer(deeper))
    wider = make_model(0, width=16)
    with pytest.raises(CheckpointError, match=r"buffer '1.running_mean' is torch.float32 \[8\] there"):
        load_checkpoint(tmp_path, wider, plain_optimizer(wider))


@pytest.mark.parametrize("width", [6, 4])
def test_a_save_of_another_model_changes_nothing(tmp_path: Path, width: int) -> None:
    """The first layer is the same. Then a layer has another width, or the optimizer has another group."""
    saved = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_checkpoint(tmp_path, saved, plain_optimizer(saved))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))
    optimizer = plain_optimizer(model)
    if width == 4:
        optimizer.inner.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = "of another model: .* shape" if width == 6 else "of another optimizer: the state has 1 groups"
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_buffer_with_less_room_than_the_save_needs_is_named(tmp_path: Path) -> None:
    model, optimizer = make_expanded([1.0, 2.0])
    model.register_buffer("mask", torch.arange(12.0).view(2, 3, 2))
    save_checkpoint(tmp_path, model, optimizer)
    other, other_optimizer = make_expanded([0.0, 0.0])
    with pytest.raises(CheckpointError, match=r"several values in buffer 'mask', .*: give it memory of its own"):
        load_checkpoint(tmp_path, other, other_optimizer)
    assert other.get_buffer("row").tolist() == [0.0, 0.0]


def test_what_a_save_lacks_is_named_where_the_model_has_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    save = save_checkpoint(tmp_path, model, plain_optimizer(model))
    counting, optimizer = make_counting()
    before = {name: value.clone() for name, value in counting.named_parameters()}
    with pytest.raises(CheckpointError, match=r"another model: it lacks the extra state of module '0'"):
        load_checkpoint(tmp_path, counting, optimizer)
    rewrite(save, modules={"0": None, "1.0": None})
    with pytest.raises(CheckpointError, match=r"it lacks the buffer or frozen parameter '0\.order', which"):
        load_checkpoint(tmp_path, counting, optimizer)
    assert all(value.equal(before[name]) for name, value in counting.named_parameters())
