"""Parameters that something else than an initialiser set are refused by name; changes are never lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Linear, init

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import adamw, assert_same, wrap_under
from tests.engine.test_empty_parameters import BATCH, LOOSE, TIGHT, Model


def empty() -> Any:
    with protrain.empty_parameters():
        return Model()


def wrap(model: nn.Module, **options: Any) -> Any:
    return protrain.wrap(model, adamw(model), example_batch=BATCH, device="cpu", progress=False, **options)


def fails_to_wrap(model: nn.Module, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        wrap(model)


@torch.no_grad()
def _a_row(block: Any) -> None:
    block.weight[0] = 1


def _skipped_on_meta(block: Any) -> None:
    init.orthogonal_(block.weight)


def _skipped_data(block: Any) -> None:
    init.trunc_normal_(block.weight.data, std=0.02)


def _scaled(block: Any) -> None:
    block.weight.data.mul_(2)


@torch.no_grad()
def _into_out(block: Any) -> None:
    torch.eye(8, out=block.weight)


def _other_data(block: Any) -> None:
    block.weight.data = torch.eye(8)


def _a_parameter_of_another(block: Any) -> None:
    block.weight = nn.Parameter(Linear(8, 8).weight.detach() * 2)


def _never(block: Any) -> None:
    block.weight = nn.Parameter(torch.empty(8, 8))


def init_weights(block: Any) -> None:
    """A function of this name is no method of a module."""
    init.normal_(block.weight)


WRITES = (_a_row, _scaled, _into_out, init_weights)
UNSEEN = (_skipped_on_meta, _skipped_data)  # by the version of a parameter
NEVER_SET = (_a_parameter_of_another, _never)


@pytest.mark.parametrize("change", [*WRITES, *UNSEEN, _other_data], ids=lambda change: change.__name__)
@pytest.mark.parametrize("same_block", [True, False])
def test_what_no_initialiser_set_is_refused_by_name_and_place(change: Callable[[Any], None], same_block: bool) -> None:
    with protrain.empty_parameters():
        model = Model()
        if same_block:
            change(model.blocks[1])
    if not same_block:
        with protrain.empty_parameters():
            change(model.blocks[1])
    place = rf"test_empty_refusals\.py, line \d+ \({change.__name__}\)"
    fails_to_wrap(model, rf"parameter blocks\.1\.weight was set by {place}, which is no initialiser.*: pass weights=")


@pytest.mark.parametrize("change", NEVER_SET, ids=lambda change: change.__name__)
def test_what_no_initialiser_ever_set_is_refused_by_name(change: Callable[[Any], None]) -> None:
    with protrain.empty_parameters():
        model = Model()
        change(model.blocks[1])
    fails_to_wrap(model, r"parameter blocks\.1\.weight was set by no initialiser.*: pass weights=")


@pytest.mark.filterwarnings("ignore:for .*. copying from a non-meta parameter")
@pytest.mark.parametrize("change", WRITES, ids=lambda change: change.__name__)
def test_changes_after_the_block_are_refused_by_name(change: Callable[[Any], None]) -> None:
    model = empty()
    change(model.blocks[1])
    fails_to_wrap(model, r"parameter blocks\.1\.weight was changed after the block .* pass weights=")
    with protrain.empty_parameters():
        _a_row(model.blocks[1])  # which does not hide it
        model.blocks[2].reset_parameters()
    fails_to_wrap(model, r"parameter blocks\.1\.weight was set by ")


def test_other_data_after_the_block_is_refused_at_once() -> None:
    model = empty()
    with pytest.raises(MisuseError, match=r"built under protrain\.empty_parameters.* do that inside"):
        model.blocks[0].weight.data = torch.ones(8, 8)
    with pytest.raises(MisuseError, match=r"do that inside `with protrain"):
        model.to(torch.bfloat16)
    model.float()  # which changes nothing
    wrap(model)


def test_a_model_on_the_meta_device_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Model()
    fails_to_wrap(model, r"parameter blocks\.0\.weight is on the meta device.*protrain\.empty_parameters\(\).*weights=")
    model = empty()
    model.blocks[1].adapter = Linear(8, 8, bias=False, device="meta")  # as it is made beside a weight that is there
    fails_to_wrap(model, r"parameter blocks\.1\.adapter\.weight is on the meta device")


def test_a_model_whose_parameters_have_no_start_takes_weights(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    source = Model()
    safetensors_torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    for spec in (TIGHT, LOOSE):
        with torch.device("meta"):
            on_meta = Model()
        with protrain.empty_parameters():
            changed = Model()
            _scaled(changed.blocks[1])
        for model in (on_meta, changed):
            wrapped, _ = wrap_under(spec, model, adamw(model), BATCH, weights=tmp_path)
            assert_same(dict(wrapped.state_dict()), source.state_dict())


class Copying(nn.Module):
    """Its initialiser makes one parameter of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.a)
        with torch.no_grad():
            self.b.copy_(self.a)


class Once(nn.Module):
    """Its initialiser does nothing when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.is_done = nn.Parameter(torch.empty(8)), False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.is_done:
            init.normal_(self.weight)
        self.is_done = True


class Partly(nn.Module):
    """Its last initialiser sets only a part of what another one has set."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2, 2)
        self.init_weights()

    def init_weights(self) -> None:
        init.ones_(self.cell.bias_ih.data[2:4])


def test_an_initialiser_that_cannot_be_called_again_is_named() -> None:
    for kind, words in (
        (Copying, r"b: Copying\.reset_parameters does not run for it alone"),
        (Once, "weight is left"),
        (Partly, r"cell\.bias_ih is left without a value by Partly\.init_weights"),
    ):
        with protrain.empty_parameters():
            model = Model()
            model.blocks[2].odd = kind()
        fails_to_wrap(model, rf"parameter blocks\.2\.odd\.{words}.*: pass weights=")
        assert all(parameter.is_meta for parameter in model.blocks[2].odd.parameters())


def test_a_buffer_that_is_computed_from_a_parameter_is_refused_by_name() -> None:
    with protrain.empty_parameters():
        model = Model()
        model.register_buffer("shadow", model.blocks[0].weight.detach().clone())
    fails_to_wrap(model, r"buffer shadow is on the meta device")


def test_wrapping_inside_is_refused() -> None:
    with protrain.empty_parameters():
        model = Model()
        fails_to_wrap(model, r"protrain\.wrap inside protrain\.empty_parameters\(\).* call it after the block")
    wrap(model)
