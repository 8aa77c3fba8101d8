"""Parameters whose values nobody recorded are refused by name; changes are recorded or refused, never lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Linear, init

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import CKPT, NONE, Spec, adamw, assert_same, seeded, wrap_under

CPU = torch.device("cpu")
TIGHT, LOOSE = Spec("none", "least", (CKPT,)), Spec("all", "all", (NONE,))
BATCH = (torch.ones(2, 8),)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def empty() -> Any:
    with protrain.empty_parameters():
        return Blocks()


def wrap(model: nn.Module, **options: Any) -> Any:
    return protrain.wrap(model, adamw(model), example_batch=BATCH, device=CPU, progress=False, **options)


def fails_to_wrap(model: nn.Module, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        wrap(model)


@torch.no_grad()
def _a_row(model: Any) -> None:
    model.blocks[1].weight[0] = 1


def _all(model: Any) -> None:
    model.blocks[1].apply(lambda module: init.zeros_(module.weight))


def _its_data(model: Any) -> None:
    model.blocks[1].weight.data.mul_(2)


def _a_part_of_its_data(model: Any) -> None:
    model.blocks[1].weight.data[:2].zero_()


@pytest.mark.filterwarnings("ignore:for .*weight. copying from a non-meta parameter")
def _from_a_state(model: Any) -> None:
    model.blocks[1].load_state_dict({"weight": torch.ones(8, 8), "bias": torch.ones(8)})


CHANGES = (_a_row, _all, _its_data, _a_part_of_its_data, _from_a_state)


@pytest.mark.filterwarnings("ignore:for .*. copying from a non-meta parameter")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_after_the_context_are_refused_by_name(change: Callable[[Any], None]) -> None:
    model = empty()
    change(model)
    fails_to_wrap(model, r"parameter blocks\.1\.weight was changed after it had been built under .* do that inside")
    with pytest.raises(ValueError, match=r"parameter Linear\.weight was changed after it had been built"):
        copy.deepcopy(model)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_same_changes_in_another_context_are_recorded(change: Callable[[Any], None]) -> None:
    with seeded(3):
        model = empty()
    untouched = copy.deepcopy(model)
    with protrain.empty_parameters():
        change(model)
    expected = {name: value.clone() for name, value in wrap(untouched)[0].state_dict().items()}
    plain = Blocks()
    plain.load_state_dict(expected)
    change(plain)
    for spec in (TIGHT, LOOSE):
        again = copy.deepcopy(model)
        wrapped, _ = wrap_under(spec, again, adamw(again), BATCH, device=CPU)
        assert_same(dict(wrapped.state_dict()), dict(plain.state_dict()), where=str(spec))


def test_other_data_after_the_context_is_refused_at_once() -> None:
    model = empty()
    with pytest.raises(MisuseError, match=r"parameter Linear\.weight was built under protrain\.empty_parameters"):
        model.blocks[0].weight.data = torch.ones(8, 8)
    with pytest.raises(MisuseError, match=r"parameter Linear\.weight .* do that inside `with protrain"):
        model.to(torch.bfloat16)
    model.float()  # which changes nothing
    wrap(model)


def test_a_copy_of_an_empty_model_has_its_values() -> None:
    model = empty()
    target = copy.deepcopy(model)
    assert target.blocks[0].weight is not model.blocks[0].weight
    assert_same(dict(wrap(target)[0].state_dict()), dict(wrap(model)[0].state_dict()))


def test_a_model_on_the_meta_device_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Blocks()
    fails_to_wrap(model, r"parameter blocks\.0\.weight is on the meta device.*protrain\.empty_parameters\(\).*weights=")
    with protrain.empty_parameters(), torch.device("meta"):
        model = Blocks()  # asked for there, so that libraries leave out what would initialise it
    fails_to_wrap(model, r"parameter blocks\.0\.weight is on the meta device")
    model = empty()
    model.blocks[1].adapter = Linear(8, 8, bias=False, device="meta")  # as it is made beside a weight that is there
    fails_to_wrap(model, r"parameter blocks\.1\.adapter\.weight is on the meta device")


def test_a_model_on_the_meta_device_takes_weights(tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    source = Blocks()
    safetensors_torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    for spec in (TIGHT, LOOSE):
        with torch.device("meta"):
            model = Blocks()
        wrapped, _ = wrap_under(spec, model, adamw(model), BATCH, device=CPU, weights=tmp_path)
        assert_same(dict(wrapped.state_dict()), source.state_dict())


def test_parameters_that_are_never_initialised_are_refused_by_name() -> None:
    with protrain.empty_parameters():
        model = Blocks()
        model.blocks[2].odd = nn.Parameter(torch.empty(8))
    fails_to_wrap(model, r"parameter blocks\.2\.odd is left without values by its constructor: initialise it inside")


def test_what_comes_from_the_meta_device_is_refused_where_it_is_used() -> None:
    with torch.device("meta"):
        other = Linear(8, 8)
    with protrain.empty_parameters():
        model = Blocks()
        with pytest.raises(ValueError, match=r"writes Linear\.weight with a tensor on the meta device"):
            model.blocks[0].weight.data.copy_(other.weight.data)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda weight: weight.sum().item(),
    "float": lambda weight: float(weight[0, 0]),
    "if": lambda weight: 1 if (weight > 0).any() else 0,
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "mask": lambda weight: weight[weight > 0],
    "nonzero": lambda weight: torch.nonzero(weight),
    "equal": lambda weight: torch.equal(weight, weight),
    "unique": lambda weight: torch.unique(weight),
    "format": lambda weight: f"{weight[0, 0]:.2f}",
    "buffer": lambda weight: torch.zeros(8, 8).copy_(weight.detach()).tolist(),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_depends_on_values_is_an_error_that_names_the_parameter(read: Callable[[Tensor], Any]) -> None:
    with protrain.empty_parameters():
        model = Blocks()
        with pytest.raises(ValueError, match=r"needs the value of Linear\.weight, .* build the model outside it"):
            read(model.blocks[0].weight)


def test_writing_a_value_to_a_tensor_from_outside_is_an_error() -> None:
    outside = torch.zeros(8, 8)
    with protrain.empty_parameters():
        model = Blocks()
        with pytest.raises(ValueError, match=r"writes the value of a parameter into a tensor that was made outside"):
            outside.copy_(model.blocks[0].weight.detach())


def test_an_error_inside_leaves_torch_as_it_was() -> None:
    class Failing(Blocks):
        def __init__(self) -> None:
            super().__init__()
            raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"), protrain.empty_parameters():
        Failing()
    assert not any(parameter.is_meta for parameter in Blocks().parameters())
    assert not copy.deepcopy(Linear(2, 2)).weight.is_meta


def test_wrapping_inside_is_refused() -> None:
    with protrain.empty_parameters():
        model = Blocks()
        fails_to_wrap(model, r"protrain\.wrap inside protrain\.empty_parameters\(\).* call it after the block")
    wrap(model)


def test_contexts_nest() -> None:
    with protrain.empty_parameters():
        with protrain.empty_parameters():
            inner = Blocks()
        outer = Blocks()
    assert all(parameter.is_meta for model in (inner, outer) for parameter in model.parameters())
    wrap(inner)
    wrap(outer)
