"""Saves and loads: nothing of another run is lost, a torn save is not there, and a resumed run has the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from tests.regressions.plain import OFFLOADED, ON_DEVICE, assert_same, both_plans, left, rows, train, wrapped


def saves(folder: Path) -> list[str]:
    """The serial numbers of what is in ``folder``."""
    return sorted(path.name[:5] for path in folder.iterdir())


READS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "the model's state": lambda model, optimizer: model.state_dict(),
    "the optimizer's state": lambda model, optimizer: optimizer.state_dict(),
    "a parameter": lambda model, optimizer: next(model.parameters()).sum().item(),
    "a load of other weights": lambda model, optimizer: model.load_state_dict(dict(wrapped(ON_DEVICE)[0].state_dict())),
}


@pytest.mark.parametrize("what", READS)
def test_nothing_is_read_or_written_between_a_load_and_the_first_call(what: str, tmp_path: Path) -> None:
    """Without an example batch, reads after load_checkpoint gave the weights from before, and writes were lost."""
    begun = wrapped(ON_DEVICE)
    train(*begun)
    protrain.save_checkpoint(tmp_path, *begun)
    model, optimizer = wrapped(ON_DEVICE, late=True)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(protrain.MisuseError, match=r"between load_checkpoint\(\) and the first call"):
        READS[what](model, optimizer)
    assert train(model, optimizer, seed=2) == train(*begun, seed=2)


def test_a_relative_folder_is_that_of_the_call_that_named_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder of async_save, or one that the first call reads, was looked for where the process was then."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    begun = wrapped(ON_DEVICE)
    train(*begun)
    saved = protrain.async_save("run", *begun)
    model, optimizer = wrapped(ON_DEVICE, late=True)
    saved.result()
    protrain.load_checkpoint("run", model, optimizer)
    again = protrain.async_save("again", *begun)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again.result()
    assert saves(tmp_path / "again") == ["00001"]
    assert train(model, optimizer, seed=2) == train(*begun, seed=2)


def test_two_runs_of_one_folder_delete_nothing_of_each_other(tmp_path: Path) -> None:
    """A training that was begun anew in a folder deleted the saves of the one before; keep counts those of one run."""
    first, second = wrapped(ON_DEVICE), wrapped(ON_DEVICE)
    for run in (first, second, first, second):
        protrain.save_checkpoint(tmp_path, *run, keep=1)
    assert saves(tmp_path) == ["00003", "00004"]
    third = wrapped(ON_DEVICE)
    protrain.save_checkpoint(tmp_path, *third, keep=1)
    assert saves(tmp_path) == ["00003", "00004", "00005"]


def test_two_saves_at_once_to_one_folder_are_both_whole(tmp_path: Path) -> None:
    """Two optimizers that saved to one folder beside their training deleted each other's unfinished saves."""
    runs = [wrapped(ON_DEVICE), wrapped(OFFLOADED)]
    for steps, run in enumerate(runs, 1):
        train(*run, steps)
    for saved in [protrain.async_save(tmp_path, *run, extra=steps) for steps, run in enumerate(runs, 1)]:
        saved.result()
    assert saves(tmp_path) == ["00001", "00002"]
    for folder in tmp_path.iterdir():
        model, optimizer = wrapped(ON_DEVICE)
        steps = protrain.load_checkpoint(folder, model, optimizer)
        assert_same(left(model, optimizer), left(*runs[steps - 1]))


def test_a_save_into_a_save_is_refused(tmp_path: Path) -> None:
    """A save into a folder that is itself a save, which no load found, is refused."""
    model, optimizer = wrapped(ON_DEVICE)
    save = protrain.save_checkpoint(tmp_path, model, optimizer)
    before = sorted(save.iterdir())
    with pytest.raises(ValueError, match="is itself a save: give the folder that it is in"):
        protrain.save_checkpoint(save, model, optimizer)
    assert sorted(save.iterdir()) == before


def test_a_folder_whose_name_is_not_utf_8_is_read_like_any_other(tmp_path: Path) -> None:
    """A checkpoint or a model in a folder whose path is not UTF-8 was called damaged when it was read."""
    folder = tmp_path / os.fsdecode(b"old\xff")
    begun = wrapped(ON_DEVICE)
    train(*begun)
    protrain.save_checkpoint(folder, *begun)
    protrain.export(begun[0], folder / "model")
    model, optimizer = wrapped(ON_DEVICE)
    protrain.load_checkpoint(folder, model, optimizer)
    assert_same(left(model, optimizer), left(*begun))
    read, _ = wrapped(ON_DEVICE, weights=folder / "model")
    assert_same(read.state_dict(), begun[0].state_dict())


@both_plans
def test_the_first_step_after_a_load_needs_no_gradient_that_torch_has_not(plan: str, tmp_path: Path) -> None:
    """The first step after a load was refused where torch has no gradients, with zero_grad(set_to_none=False)."""
    begun = wrapped(plan)
    train(*begun)
    protrain.save_checkpoint(tmp_path, *begun)
    model, optimizer = wrapped(plan)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    for each in (model, begun[0]):
        each.get_submodule("blocks.1").requires_grad_(False)
    optimizer.zero_grad(set_to_none=False)
    for each, its in ((model, optimizer), begun):
        each(rows(9)).square().mean().backward()
        its.step()
    assert_same(left(model, optimizer), left(*begun))


def zero(model: nn.Module) -> None:
    with protrain.full_parameters(model), torch.no_grad():
        next(model.parameters()).zero_()


@both_plans
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_hook_may_save_and_may_not_load(plan: str, place: str, tmp_path: Path) -> None:
    """Weights that were loaded or edited from a hook inside a forward or backward were written half."""
    model, optimizer = wrapped(plan)
    train(model, optimizer)
    before, said = left(model, optimizer), []

    def hook(*_: Any) -> None:
        protrain.save_checkpoint(tmp_path, model, optimizer)
        for write in (
            lambda: protrain.load_checkpoint(tmp_path, model, optimizer),
            lambda: model.load_state_dict(model.state_dict()),
            lambda: zero(model),
        ):
            with pytest.raises((protrain.MisuseError, RuntimeError)) as caught:
                write()
            said.append(str(caught.value))

    block = model.get_submodule("blocks.1")
    register = block.register_forward_hook if place == "forward" else block.register_full_backward_hook
    handle = register(hook)
    loss = model(rows(2)).square().mean()
    loss.backward()
    handle.remove()
    optimizer.zero_grad()
    assert said
    assert all("inside a forward or backward" in each for each in said)
    assert_same(left(model, optimizer), before)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    assert_same(left(model, optimizer), before)
