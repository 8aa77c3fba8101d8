"""Checkpoints of a wrapped model: what freezing, groups and full_parameters() mean for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.common.errors import CheckpointError, MisuseError
from tests.engine import residual
from tests.engine.harness import NONE, Loop, Spec, adamw, assert_same, states, wrap_under


def test_what_is_frozen_now_has_the_weights_it_was_trained_to(device: torch.device, tmp_path: Path) -> None:
    data = residual.batches(3)
    model = residual.make()
    wrapped, optimizer = wrap_under(Spec("none", "least", (NONE,)), model, adamw(model), data[0], device=device)
    Loop().run(wrapped, optimizer, data)
    protrain.save_checkpoint(tmp_path, wrapped, optimizer)
    expected = {name: value.clone() for name, value in wrapped.state_dict().items()}
    frozen = residual.make()
    frozen.get_submodule("blocks.1").requires_grad_(False)
    again, other = wrap_under(Spec("none", "least", (NONE,)), frozen, adamw(frozen), data[0], device=device)
    protrain.load_checkpoint(tmp_path, again, other)
    assert_same(dict(again.state_dict()), expected)


def _in_groups(*groups: str) -> tuple[nn.Module, Any]:
    """A wrapped model, of whose parameters each group has those of a name; only "weight" decays."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    of_kind = [[value for name, value in model.named_parameters() if name.endswith(kind)] for kind in groups]
    decays = [0.1 if kind == "weight" else 0.0 for kind in groups]
    optimizer = torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in zip(of_kind, decays, strict=True)])
    return protrain.wrap(model, optimizer, example_batch=(torch.ones(4, 8),), device="cpu", progress=False)


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    """Their options would become those of other parameters."""
    model, optimizer = _in_groups("weight", "bias")
    save = protrain.save_checkpoint(tmp_path, model, optimizer)
    other, other_optimizer = _in_groups("bias", "weight")
    before = {name: value.clone() for name, value in other.state_dict().items()}
    words = f"{save} is of another optimizer: 0.bias is in group 1 of its param_groups, and in group 0 here: make the"
    with pytest.raises(CheckpointError, match=words):
        protrain.load_checkpoint(tmp_path, other, other_optimizer)
    assert_same(dict(other.state_dict()), before)
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.0, 0.1]
    same, same_optimizer = _in_groups("weight", "bias")
    protrain.load_checkpoint(tmp_path, same, same_optimizer)


def test_a_load_inside_full_parameters_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = _in_groups("weight", "bias")
    model.register_buffer("count", torch.zeros(()))
    protrain.save_checkpoint(tmp_path, model, optimizer)
    model.get_buffer("count").fill_(5.0)
    with (
        pytest.raises(MisuseError, match=r"inside `with protrain.full_parameters\(...\)`"),
        protrain.full_parameters(model),
    ):
        protrain.load_checkpoint(tmp_path, model, optimizer)
    assert model.get_buffer("count") == 5.0


def edit(model: nn.Module) -> None:
    with protrain.full_parameters(model), torch.no_grad():
        next(model.parameters()).zero_()


def apply_averages(model: nn.Module) -> None:
    averaged = protrain.AveragedWeights(model)
    averaged.update()
    with averaged.applied():
        pass


WRITES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "load_checkpoint": lambda model, optimizer, folder: protrain.load_checkpoint(folder, model, optimizer),
    "model": lambda model, optimizer, folder: model.load_state_dict(model.state_dict()),
    "part": lambda model, optimizer, folder: model.leave.load_state_dict(model.leave.state_dict()),
    "optimizer": lambda model, optimizer, folder: optimizer.load_state_dict(optimizer.state_dict()),
    "edit": lambda model, optimizer, folder: edit(model),
    "averages": lambda model, optimizer, folder: apply_averages(model),
}


@pytest.mark.parametrize(
    ("spec", "what"),
    [*zip([Spec("all", "least", (NONE,)), Spec("none", "least", (NONE,), speculate=True)] * 3, WRITES, strict=True)],
    ids=str,
)
def test_a_hook_may_save_and_what_would_write_there_changes_nothing(spec: Spec, what: str, tmp_path: Path) -> None:
    """Under every plan, as a unit is using its weights then, and a speculative update its states."""
    data = residual.batches(3)
    found = []
    for acts in (False, True):
        model = residual.make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=torch.device("cpu"))
        Loop().run(wrapped, optimizer, data[:1])
        before = states(wrapped, optimizer)
        refused: list[str] = []

        def act(*_: Any) -> None:
            protrain.save_checkpoint(tmp_path, wrapped, optimizer)  # noqa: B023  # called in this turn
            with pytest.raises((MisuseError, RuntimeError), match="inside a forward or backward, which uses") as error:
                WRITES[what](wrapped, optimizer, tmp_path)  # noqa: B023  # called in this turn
            refused.append(str(error.value))  # noqa: B023  # called in this turn

        block = wrapped.get_submodule("blocks.1")
        hooks = [block.register_forward_hook(act), block.register_full_backward_hook(act)] if acts else []
        Loop().run(wrapped, optimizer, data[1:2])
        for hook in hooks:
            hook.remove()
        assert len(refused) == len(hooks)
        found.append(states(wrapped, optimizer))
    assert_same(*found)
    protrain.load_checkpoint(tmp_path, wrapped, optimizer)
    assert_same(states(wrapped, optimizer), before)
