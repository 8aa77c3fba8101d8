"""A load names what it refuses, with a remedy, before anything has changed."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

from protrain import CheckpointError, load_checkpoint, save_checkpoint
from protrain.checkpoint.manifest import MANIFEST, list_saves, random_state, read_manifest, write_manifest
from tests.checkpoints import make_counting, make_expanded, make_model, make_run, train, wrapped


def values_of(model: nn.Module) -> list[Tensor]:
    return [value.detach() for value in (*model.parameters(), *model.buffers())]


@contextmanager
def refused(words: str, model: nn.Module) -> Iterator[pytest.ExceptionInfo[CheckpointError]]:
    """A load inside is refused with ``words``, and changes neither ``model`` nor random numbers."""
    before, drawn = [value.clone() for value in values_of(model)], random_state()
    with pytest.raises(CheckpointError, match=words) as raised:
        yield raised
    assert all(map(torch.equal, values_of(model), before))
    assert random_state() == drawn


def sequential(then: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer), then(optimizer)], milestones=[2]
    )


STEPS, EXPONENTIAL = partial(schedulers.StepLR, step_size=2), partial(schedulers.ExponentialLR, gamma=0.9)
LAMBDA = partial(schedulers.LambdaLR, lr_lambda=lambda step: 1 / (step + 1))
ONE_CYCLE = partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=9)


@pytest.mark.parametrize(
    ("saved", "given", "words"),
    [
        (STEPS, LAMBDA, "StepLR, and LambdaLR was given"),
        (LAMBDA, sequential(STEPS), r"LambdaLR, and SequentialLR\(ConstantLR, StepLR\) was given"),
        (LAMBDA, ONE_CYCLE, "LambdaLR, and OneCycleLR was given"),
        (sequential(STEPS), sequential(EXPONENTIAL), r".*, StepLR\), and .*, ExponentialLR\) was given"),
    ],
)
def test_another_scheduler_is_refused(tmp_path: Path, saved: Any, given: Any, words: str) -> None:
    model, optimizer, _ = make_run(0)
    save = save_checkpoint(tmp_path, model, optimizer, scheduler=saved(optimizer))
    load_checkpoint(tmp_path, model, optimizer, scheduler=saved(optimizer))
    other, optimizer, _ = make_run(1)
    scheduler = given(optimizer)
    position = scheduler.state_dict()
    with refused(f"{save} holds the state of {words}; pass the scheduler it was saved", other):
        load_checkpoint(tmp_path, other, optimizer, scheduler=scheduler)
    assert scheduler.state_dict() == position


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def unreadable(number: int, name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Opening the file fails, as with root's rights no mode makes it."""

    def damage(save: Path, patch: pytest.MonkeyPatch) -> None:
        opened = io.open

        def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
            if path == save / name:
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, *arguments, **options)

        for module in (io, builtins):  # Path.open uses the first
            patch.setattr(module, "open", refuse)

    return damage


STATE, BUFFERS = "state-00001.safetensors", "buffers.safetensors"
CHANGED = f"{MANIFEST} is damaged: its checksum"
NEWER = "has format 6, and this version of ProTrain reads format 5: load it with the version that wrote it"
DENIED, BROKEN = os.strerror(errno.EACCES), os.strerror(errno.EIO)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda save, _: (save / STATE).unlink(), f"{STATE} is missing"),
        (lambda save, _: os.truncate(save / STATE, 100), "has 100 bytes instead of"),
        (lambda save, _: flip(save / STATE), f"{STATE} is damaged: its checksum"),
        (lambda save, _: flip(save / BUFFERS), f"{BUFFERS} is damaged: its checksum"),
        (lambda save, _: flip(save / STATE, at=7), f"{STATE} is damaged: "),
        (lambda save, _: (save / MANIFEST).write_text('{"format": 5'), f"{MANIFEST} is damaged"),
        (lambda save, _: (save / MANIFEST).write_text('{"format": 5}'), CHANGED),
        (lambda save, _: (save / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda save, _: (save / MANIFEST).write_text('{"format": 6}'), NEWER),
        (unreadable(errno.EACCES, MANIFEST), f"cannot read .*{MANIFEST}: {DENIED}"),
        (unreadable(errno.EIO, BUFFERS), f"cannot read .*{BUFFERS}: {BROKEN}"),
    ],
)
def test_damage_is_named_with_an_older_save_and_what_is_not_damaged_is_not_to_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, words: str
) -> None:
    model, optimizer, scheduler = make_run(0)
    for _ in range(2):
        train(model, optimizer, scheduler)
        save_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    older, newest = list_saves(tmp_path)
    train(model, optimizer, scheduler)
    damage(newest, monkeypatch)
    with refused(words, model) as raised:
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert str(newest) in str(raised.value)
    is_whole = words == NEWER or words.startswith("cannot read")
    assert ("delete" in str(raised.value), older.name in str(raised.value)) == (not is_whole, not is_whole)
    load_checkpoint(older, model, optimizer, scheduler=scheduler)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    model, optimizer, _ = make_run(0)
    (tmp_path / "run" / "checkpoints" / "00001-step-4").mkdir(parents=True)
    for folder, words in {"nowhere": "nowhere does not exist", "run": "run holds no checkpoint; give the fol"}.items():
        with refused(words, model):
            load_checkpoint(tmp_path / folder, model, optimizer)


def test_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer, scheduler = make_run(0)
    train(model, optimizer, scheduler)
    save_checkpoint(tmp_path, model, optimizer)
    with refused("the state of no scheduler, and MultiStepLR was given", model):
        load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    deeper, wider = nn.Sequential(*make_model(0), nn.Linear(2, 2)), make_model(0, width=16)
    lacks, differs = r"lacks the parameter '4.bias'", r"buffer '1.running_mean' is torch.float32 \[8\] there"
    for other, words in ((deeper, lacks), (wider, differs)):
        training = wrapped(other)
        with refused(words, training[0]):
            load_checkpoint(tmp_path, *training)


@pytest.mark.parametrize(("width", "n_groups", "words"), [(6, 1, "model: .* shape"), (4, 2, "optimizer: .* 1 ")])
def test_a_save_of_another_training_changes_nothing(tmp_path: Path, width: int, n_groups: int, words: str) -> None:
    """The first layer is the same. Then a layer has another width, or the optimizer has another group."""
    saved, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, each)) for each in (4, width))
    save_checkpoint(tmp_path, *wrapped(saved))
    training = wrapped(other, n_groups)
    with refused(f"of another {words}", training[0]):
        load_checkpoint(tmp_path, *training)


def test_a_buffer_with_less_room_than_the_save_needs_is_named(tmp_path: Path) -> None:
    model, optimizer = make_expanded([1.0, 2.0])
    model.register_buffer("mask", torch.arange(12.0).view(2, 3, 2))
    save_checkpoint(tmp_path, model, optimizer)
    other, optimizer = make_expanded([0.0, 0.0])
    with refused(r"several values in buffer 'mask', .*: give it memory of its own", other):
        load_checkpoint(tmp_path, other, optimizer)


def test_what_a_save_lacks_is_named_where_the_model_has_it(tmp_path: Path) -> None:
    save = save_checkpoint(tmp_path, *wrapped(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))))
    counting, optimizer = make_counting()
    with refused(r"another model: it lacks the extra state of module '0'", counting):
        load_checkpoint(tmp_path, counting, optimizer)
    write_manifest(save, {**read_manifest(save), "modules": {"0": None, "1.0": None}})
    with refused(r"it lacks the buffer or frozen parameter '0\.order', which", counting):
        load_checkpoint(tmp_path, counting, optimizer)
