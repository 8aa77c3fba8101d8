"""Saves are atomic, loads are exact, damage is named."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import protrain.checkpoint
from protrain.checkpoint import load_checkpoint, save_checkpoint
from protrain.errors import CheckpointError
from protrain.manifest import MANIFEST, list_saves
from protrain.random_state import random_state
from protrain.tensor_files import TensorWriter


class PlainOptimizer:
    """torch.optim.AdamW behind the streaming interface: what a wrapped optimizer does, without chunks."""

    def __init__(self, model: nn.Module, learning_rate: float = 1e-2) -> None:
        self.model = model
        self.inner = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def trains(self, model: nn.Module) -> bool:
        return model is self.model

    def parameter_names(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.is_floating_point()]

    def export_parameter(self, name: str) -> dict[str, torch.Tensor]:
        parameter = self.model.get_parameter(name)
        state = {kind: value.clone() for kind, value in self.inner.state[parameter].items()}
        return {"master": parameter.detach().clone(), **state}

    def check_parameter(self, name: str, tensors: Mapping[str, Any]) -> None:
        parameter = self.model.get_parameter(name)
        if tensors["master"].shape != parameter.shape:
            raise ValueError(f"{name} has shape {list(parameter.shape)}")

    def import_parameter(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        parameter = self.model.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(tensors["master"])
        self.inner.state[parameter] = {kind: tensors[kind] for kind in tensors if kind != "master"}

    def scalar_state(self) -> dict[str, Any]:
        return {"groups": [{k: v for k, v in group.items() if k != "params"} for group in self.inner.param_groups]}

    def check_scalar_state(self, state: dict[str, Any]) -> None:
        if len(state["groups"]) != len(self.inner.param_groups):
            raise ValueError(f"the state has {len(state['groups'])} groups")

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self.inner.param_groups, state["groups"], strict=True):
            group.update(saved)


def make_model(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: PlainOptimizer, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        # draws from all three generators, so that a resumed run needs every one of them
        batch = torch.randn(16, 4) + random.random() + float(np.random.rand())
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.inner.step()
        optimizer.inner.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def make_run(seed: int) -> tuple[nn.Sequential, PlainOptimizer, Any]:
    model = make_model(seed)
    optimizer = PlainOptimizer(model)
    # Milestones are a Counter with whole numbers as keys, which JSON alone would turn into text.
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer.inner, milestones=[3, 7], gamma=0.5)
    return model, optimizer, scheduler


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    model, optimizer, scheduler = make_run(0)
    train(model, optimizer, scheduler, 5)
    save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, extra={"step": 5, "pair": (1, 2)})
    expected = train(model, optimizer, scheduler, 5)

    random.seed(2)
    np.random.seed(2)
    other, other_optimizer, other_scheduler = make_run(99)
    train(other, other_optimizer, other_scheduler, 2)
    extra = load_checkpoint(tmp_path, other, other_optimizer, scheduler=other_scheduler)
    assert extra == {"step": 5, "pair": (1, 2)}
    assert train(other, other_optimizer, other_scheduler, 5) == expected
    for (name, value), (_, wanted) in zip(other.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(value, wanted), name
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr() == [0.01 * 0.25]


def test_the_newest_saves_are_kept_and_numbered(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    for _ in range(4):
        train(model, optimizer, scheduler, 1)
        save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, keep=2)
    assert [save.name for save in list_saves(tmp_path)] == ["00003-step-3", "00004-step-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00003-step-3", "00004-step-4"]


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    save_checkpoint(tmp_path, model, optimizer, extra={"rate": torch.tensor(1e-3), "step": torch.tensor(7)})
    extra = load_checkpoint(tmp_path, model, optimizer)
    assert (extra["rate"].dtype, extra["step"].dtype) == (torch.float32, torch.int64)
    assert torch.equal(extra["rate"], torch.tensor(1e-3))
    assert extra["step"].item() == 7


def test_nothing_of_others_is_deleted(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    for name in (".notes.tmp", ".00007.tmp", ".00001-step-1.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".file.tmp").touch()
    save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.tmp", ".notes.tmp", "00001-step-0"]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save_checkpoint(tmp_path, model, optimizer, keep=0)
    plain: Any = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    for use in (save_checkpoint, load_checkpoint):
        with pytest.raises(ValueError, match=r"the one that protrain\.wrap returned, not a plain AdamW"):
            use(tmp_path, model, plain)


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
    ("saved", "given", "tells", "words"),
    [
        (_steps, _lambda, True, "a StepLR, not of a LambdaLR"),
        (_lambda, _sequential(_steps), True, r"a LambdaLR, not of a SequentialLR\(ConstantLR, StepLR\)"),
        (_lambda, _one_cycle, True, "a LambdaLR, not of a OneCycleLR"),
        (_sequential(_steps), _sequential(_exponential), True, r".*, StepLR\), not of a .*, ExponentialLR\)"),
        (_sequential(_lambda), _sequential(_lambda), True, ""),
        (_steps, _lambda, False, "another scheduler than a LambdaLR: it has 'gamma'"),
        (_lambda, _sequential(_steps), False, r"another scheduler than a SequentialLR\(.*: it has 'base_lrs'"),
        (_lambda, _one_cycle, False, "another scheduler than a OneCycleLR: it lacks 'cycle_momentum'"),
        (_sequential(_lambda), _sequential(_lambda), False, ""),
    ],
)
def test_another_scheduler_is_refused(tmp_path: Path, saved: Any, given: Any, tells: bool, words: str) -> None:
    """By its class where the save tells that, which the first ones do not."""
    model, optimizer, _ = make_run(0)
    save = save_checkpoint(tmp_path, model, optimizer, scheduler=saved(optimizer.inner))
    if not tells:
        _rewrite(save, "scheduler_class")
    other, other_optimizer, _ = make_run(1)
    scheduler = given(other_optimizer.inner)
    if not words:
        load_checkpoint(tmp_path, other, other_optimizer, scheduler=scheduler)
        return
    before, position = other.state_dict()["0.weight"].clone(), scheduler.state_dict()
    with pytest.raises(CheckpointError, match=f"{save} holds the state of {words}.*; pass the scheduler it was saved"):
        load_checkpoint(tmp_path, other, other_optimizer, scheduler=scheduler)
    assert other.state_dict()["0.weight"].equal(before)
    assert scheduler.state_dict() == position


def test_an_older_save_loads_by_its_own_folder(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    for step in (1, 2):
        train(model, optimizer, scheduler, 1)
        save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, extra=step)
    assert load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler) == 2
    assert load_checkpoint(tmp_path / "00001-step-1", model, optimizer, scheduler=scheduler) == 1


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda save: (save / "state-00001.safetensors").unlink(), "state-00001.safetensors is missing"),
        (lambda save: os.truncate(save / "state-00001.safetensors", 100), "has 100 bytes instead of"),
        (lambda save: _flip(save / "state-00001.safetensors"), "state-00001.safetensors is damaged: its checksum"),
        (lambda save: _flip(save / "buffers.safetensors"), "buffers.safetensors is damaged"),
        (lambda save: (save / MANIFEST).write_text('{"format": 1'), "checkpoint.json is damaged"),
        (lambda save: (save / MANIFEST).write_text('{"format": 1}'), "checkpoint.json lacks 'extra'"),
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
    (list_saves(tmp_path)[-1] / MANIFEST).write_text('{"format": 2}')
    words = "has format 2, and this version of ProTrain reads format 1: load it with the version that wrote it, or a"
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

    for module in (io, builtins):  # a Path opens itself by the first; root may read everything, whatever its mode
        monkeypatch.setattr(module, "open", refuse)
    with pytest.raises(CheckpointError, match=f"cannot read {unreadable}: {os.strerror(number)}") as raised:
        load_checkpoint(tmp_path, model, optimizer)
    assert "delete" not in str(raised.value)


def test_a_full_disk_is_named_and_leaves_the_earlier_save(tmp_path: Path) -> None:
    model = make_model(0, width=2000)
    optimizer = PlainOptimizer(model)
    earlier = save_checkpoint(tmp_path, model, optimizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))  # writing further fails, as on a full disk
    try:
        with pytest.raises(OSError, match=r"cannot write .*/state-00001\.safetensors: "):
            save_checkpoint(tmp_path, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [earlier.name]
    load_checkpoint(tmp_path, model, optimizer)


@pytest.mark.parametrize("failing", ["write_tensors", "write_manifest", "sync_directory"])
@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_save_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: type[BaseException]
) -> None:
    model, optimizer, _ = make_run(0)
    earlier = save_checkpoint(tmp_path, model, optimizer)

    def fail(*_: Any) -> None:
        raise error("failed")

    monkeypatch.setattr(protrain.checkpoint, failing, fail)
    with pytest.raises(error, match="failed"):
        save_checkpoint(tmp_path, model, optimizer)
    assert list(tmp_path.iterdir()) == [earlier]


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_checkpoint(tmp_path / "nowhere", model, optimizer)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_checkpoint(tmp_path, model, optimizer)


def test_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    train(model, optimizer, scheduler, 1)
    save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="no scheduler state"):
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    deeper = nn.Sequential(*model, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"lacks the parameter '4.bias', which the model has"):
        load_checkpoint(tmp_path, deeper, PlainOptimizer(deeper))
    wider = make_model(0, width=16)
    with pytest.raises(CheckpointError, match=r"buffer '1.running_mean' is torch.float32 \[8\] there"):
        load_checkpoint(tmp_path, wider, PlainOptimizer(wider))


@pytest.mark.parametrize("width", [6, 4])
def test_a_save_of_another_model_changes_nothing(tmp_path: Path, width: int) -> None:
    """The first layer is the same; then comes one of another width, or the optimizer has another group."""
    saved = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    save_checkpoint(tmp_path, saved, PlainOptimizer(saved))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))
    optimizer = PlainOptimizer(model)
    if width == 4:
        optimizer.inner.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    words = "of another model: .* shape" if width == 6 else "of another optimizer: the state has 1 groups"
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_model_and_optimizer_belong_together(tmp_path: Path) -> None:
    one, other = make_model(0), make_model(1)
    with pytest.raises(ValueError, match="optimizer is of another model"):
        save_checkpoint(tmp_path, one, PlainOptimizer(other))
    assert not list(tmp_path.iterdir())


def _rewrite(save: Path, *without: str, **changes: Any) -> None:
    """Give the manifest of ``save`` other entries, and no checksum: as the first saves."""
    manifest = {**json.loads((save / MANIFEST).read_text()), **changes}
    without = (*without, "crc32")
    (save / MANIFEST).write_text(json.dumps({key: manifest[key] for key in manifest if key not in without}))


@pytest.mark.parametrize("change", [{"format": None}, {"files": []}], ids=str)
def test_a_damaged_manifest_has_a_remedy(tmp_path: Path, change: dict[str, Any]) -> None:
    model, optimizer, _ = make_run(0)
    for _ in range(2):
        save_checkpoint(tmp_path, model, optimizer)
    _rewrite(list_saves(tmp_path)[-1], **change)
    with pytest.raises(CheckpointError, match=r"delete .*00002.* to go on from 00001"):
        load_checkpoint(tmp_path, model, optimizer)


def test_a_manifest_with_another_digit_is_damaged(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    extra = {"zero": -0.0, "none": float("nan"), 7: "µ", "least": 5e-324, "large": 10**30}  # what JSON may write anew
    for _ in range(2):
        save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler, extra=extra)
    assert str(load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)) == str(extra)
    older, newer = (save / MANIFEST for save in list_saves(tmp_path))
    text = newer.read_text()
    assert '"lr": 0.01,' in text
    newer.write_text(text.replace('"lr": 0.01,', '"lr": 0.81,'))
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged: its checksum differs; delete .* 00001"):
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert optimizer.inner.param_groups[0]["lr"] == 0.01
    _rewrite(older.parent)
    load_checkpoint(older.parent, model, optimizer, scheduler=scheduler)


def make_expanded(row: list[float]) -> tuple[nn.Module, PlainOptimizer]:
    model = nn.Linear(4, 4)
    model.register_buffer("row", torch.tensor(row))
    model.register_buffer("mask", model.get_buffer("row").expand(2, 3, len(row)))
    model.register_buffer("last", model.get_buffer("row")[-1].expand(4))
    return model, PlainOptimizer(model)


def test_expanded_buffers_are_restored_and_stay_views(tmp_path: Path) -> None:
    model, optimizer = make_expanded([1.0, float("nan"), -0.0])
    save_checkpoint(tmp_path, model, optimizer)
    other, other_optimizer = make_expanded([0.0, 0.0, 0.0])
    load_checkpoint(tmp_path, other, other_optimizer)
    for name in ("row", "mask", "last"):
        assert str(other.get_buffer(name)) == str(model.get_buffer(name))
    other.get_buffer("row").fill_(5.0)
    assert (other.get_buffer("mask") == 5.0).all()


def test_a_buffer_with_less_room_than_the_save_needs_is_named(tmp_path: Path) -> None:
    model, optimizer = make_expanded([1.0, 2.0])
    model.register_buffer("mask", torch.arange(12.0).view(2, 3, 2))
    save_checkpoint(tmp_path, model, optimizer)
    other, other_optimizer = make_expanded([0.0, 0.0])
    with pytest.raises(CheckpointError, match=r"several values in buffer 'mask', .*: give it memory of its own"):
        load_checkpoint(tmp_path, other, other_optimizer)
    assert other.get_buffer("row").tolist() == [0.0, 0.0]


@pytest.mark.parametrize("generator", ["torch", "python", "numpy"])
def test_random_states_are_checked_before_anything_changes(tmp_path: Path, generator: str) -> None:
    model, optimizer, _ = make_run(0)
    save = save_checkpoint(tmp_path, model, optimizer)
    states = json.loads((save / MANIFEST).read_text())["random"]
    version, words, gauss = states["python"]
    cut = {
        "torch": states["torch"][:400],
        "python": [version, words[:5], gauss],
        "numpy": {**states["numpy"], "key": states["numpy"]["key"][:5]},
    }
    _rewrite(save, random={**states, generator: cut[generator]})
    other, other_optimizer, _ = make_run(1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    drawn = random_state()
    with pytest.raises(CheckpointError, match=f"{save} holds random states that cannot be set: .*; load another save"):
        load_checkpoint(tmp_path, other, other_optimizer)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert random_state() == drawn


class Counting(nn.Linear):
    """Has state of every kind that a module may have."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)
        self.state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def make_counting() -> tuple[nn.Sequential, PlainOptimizer]:
    model = nn.Sequential(Counting(), nn.Sequential(Counting()))
    return model, PlainOptimizer(model)


def test_extra_state_and_integer_parameters_are_whole(tmp_path: Path) -> None:
    model, optimizer = make_counting()
    scale = torch.tensor([float("nan"), -0.0, 3.0]).to(torch.bfloat16)
    first, second = (module for module in model.modules() if isinstance(module, Counting))
    first.state = {"calls": (3, 4.5), "scale": scale, 7: [torch.tensor(2**40), b"\x00\xff", "text", None, True]}
    second.order.copy_(torch.tensor([3, 1, 2, 0]))
    save_checkpoint(tmp_path, model, optimizer)
    loaded, other = make_counting()
    load_checkpoint(tmp_path, loaded, other)
    found = [module for module in loaded.modules() if isinstance(module, Counting)]
    assert found[1].order.tolist() == [3, 1, 2, 0]
    assert found[1].state is None
    assert found[0].state["calls"] == (3, 4.5)
    assert found[0].state["scale"].view(torch.int16).equal(scale.view(torch.int16))
    large, *rest = found[0].state[7]
    assert large.dtype is torch.int64
    assert large.item() == 2**40
    assert rest == [b"\x00\xff", "text", None, True]


def test_extra_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    model, optimizer = make_counting()
    for module in model.modules():
        if isinstance(module, Counting):
            module.state = {1, 2}
    with pytest.raises(ValueError, match=r"the extra state of module '0' holds a set; a checkpoint keeps .*tensors"):
        save_checkpoint(tmp_path / "run", model, optimizer)
    assert not list(tmp_path.iterdir())


def test_types_that_no_file_holds_are_named(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    model.register_buffer("waves", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"waves is torch\.complex128, which safetensors files cannot hold"):
        save_checkpoint(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())


def test_what_older_checkpoints_lack_is_named_where_the_model_has_it(tmp_path: Path) -> None:
    """The first of them held neither extra state nor parameters that are no floating-point numbers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    save = save_checkpoint(tmp_path, model, PlainOptimizer(model))
    _rewrite(save, "modules")
    load_checkpoint(tmp_path, model, PlainOptimizer(model))
    counting, optimizer = make_counting()
    before = {name: value.clone() for name, value in counting.named_parameters()}
    with pytest.raises(CheckpointError, match=r"or of a version that .*: it lacks the extra state of module '0'"):
        load_checkpoint(tmp_path, counting, optimizer)
    _rewrite(save, modules={"0": None, "1.0": None})
    with pytest.raises(CheckpointError, match=r"it lacks the integer parameter '0\.order', which the model has"):
        load_checkpoint(tmp_path, counting, optimizer)
    assert all(value.equal(before[name]) for name, value in counting.named_parameters())


def test_state_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    with pytest.raises(ValueError, match="extra holds a Tensor"):
        save_checkpoint(tmp_path, model, optimizer, extra={"tensor": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_files_are_bounded_and_a_parameter_is_never_split(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path, "state", file_bytes=1000)
    for index in range(7):
        tensor = torch.full((50,), float(index))
        writer.add(f"p{index}", {f"master/p{index}": tensor, f"exp_avg/p{index}": tensor + 1})
    writer.flush()
    assert [file.owners for file in writer.files] == [("p0", "p1"), ("p2", "p3"), ("p4", "p5"), ("p6",)]
    assert all((tmp_path / file.name).stat().st_size == file.bytes < 1500 for file in writer.files)


_SAVE_FOREVER = """
import sys
import torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import make_run, train
from protrain.checkpoint import save_checkpoint
model, optimizer, scheduler = make_run(0)
print("ready", flush=True)
while True:
    train(model, optimizer, scheduler, 1)
    save_checkpoint(sys.argv[1], model, optimizer, scheduler=scheduler)
"""


def test_a_save_killed_at_any_moment_leaves_a_loadable_one(tmp_path: Path) -> None:
    serials: list[int] = []
    for attempt in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVE_FOREVER, str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        while not (saves := list_saves(tmp_path)) or int(saves[-1].name[:5]) <= max(serials, default=0):
            time.sleep(0.005)
        time.sleep(0.013 * (attempt + 1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        model, optimizer, scheduler = make_run(1)
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
        newest = list_saves(tmp_path)[-1]
        step = json.loads((newest / MANIFEST).read_text())["step"]
        assert newest.name.endswith(f"-step-{step}")
        assert {int(state["step"]) for state in optimizer.inner.state.values()} == {step}
        serials.append(int(newest.name[:5]))
    assert serials == sorted(set(serials)), "every process saved on top of what the killed one left"
