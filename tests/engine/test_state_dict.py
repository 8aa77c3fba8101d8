"""Weights go out and come in under real names, whole and exact, whatever the plan; so they are edited in place."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from tests.engine import residual
from tests.engine.harness import NONE, Batch, Spec, adamw, assert_same, states, wrap_under
from tests.engine.plain_loop import rounded
from tests.engine.stateful import DTYPES, LOOP, SECOND, SPECS, Make, maker


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def batches(tiny_batch: Callable[..., Batch]) -> list[Batch]:
    return [tiny_batch(seed=seed) for seed in range(10)]


@pytest.fixture
def make(tiny_model: Callable[..., nn.Module], batches: list[Batch], device: torch.device) -> Make:
    return maker(tiny_model, batches[0], device)


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """An unwrapped model with the weights that wrapping gives it."""
    for parameter in model.parameters():
        parameter.data = rounded(parameter.data, dtype)
    return model


@pytest.mark.parametrize(
    ("family", "spec", "dtype"),
    [
        ("t5", SPECS[0], torch.bfloat16),
        ("t5", SPECS[1], torch.float32),
        ("gpt2", SPECS[0], torch.float32),
        ("gpt2", SPECS[1], torch.bfloat16),
        ("gpt2", SPECS[2], torch.float16),
    ],
    ids=str,
)
def test_state_dict_is_that_of_the_unwrapped_model(
    family: str, spec: Spec, dtype: torch.dtype, make: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    model, _ = make(spec, dtype, family)
    plain = cast(tiny_model(family), dtype)
    expected = plain.state_dict()
    found = model.state_dict()
    assert list(found) == list(expected)
    assert vars(found) == vars(expected)  # the versions of modules
    assert_same({k: v.cpu() for k, v in found.items()}, dict(expected))
    for name in ("transformer.h.1", "encoder.block.0.layer.0", "lm_head"):
        if name in dict(plain.named_modules()):
            part, wanted = model.get_submodule(name).state_dict(), plain.get_submodule(name).state_dict()
            assert_same({k: v.cpu() for k, v in part.items()}, dict(wanted))
    other = cast(tiny_model(family, seed=5), dtype)
    other.load_state_dict(found, strict=True)
    assert_same(dict(other.state_dict()), dict(expected))
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())


def test_a_state_dict_is_a_copy_of_its_moment(make: Make, batches: list[Batch]) -> None:
    for spec in SPECS:
        model, optimizer = make(spec)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        taken, moments = model.state_dict(), optimizer.state_dict()
        LOOP.run(model, optimizer, batches[:2])
        assert all(torch.equal(taken[name], before[name]) for name in before)
        assert not torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])
        assert moments["state"] == {}
        for value in taken.values():
            value.fill_(7.0)
        assert not any((value == 7.0).all() for value in model.state_dict().values())


def test_tied_weights_are_one_tensor(make: Make, batches: list[Batch]) -> None:
    model, optimizer = make()
    LOOP.run(model, optimizer, batches[:1])
    found = model.state_dict()
    assert found["lm_head.weight"].data_ptr() == found["transformer.wte.weight"].data_ptr()
    file = io.BytesIO()
    torch.save(found, file)
    assert file.tell() < 1.3 * sum({v.data_ptr(): v.nbytes for v in found.values()}.values()) + 50_000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded, dict(found))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_values_that_say_more_than_a_weight_holds_become_the_master(device: torch.device) -> None:
    data = residual.batches(1)
    model = residual.make()
    spec = Spec("none", "least", (NONE,))
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    name = "blocks.1.first.weight"
    finer = wrapped.state_dict()[name].float() * (1 + 2.0**-12)
    wrapped.load_state_dict({name: finer}, strict=False)
    assert torch.equal(optimizer.export_parameter(name)["master"], finer.cpu())
    wrapped.load_state_dict({name: finer.bfloat16()}, strict=False)
    assert torch.equal(optimizer.export_parameter(name)["master"], finer.cpu()), "the same weight says nothing new"


def test_save_pretrained_writes_the_weights(
    make: Make, batches: list[Batch], dtype: torch.dtype, tmp_path: Path
) -> None:
    for family in ("gpt2", "llama"):
        model, optimizer = make(SECOND, dtype, family)
        LOOP.run(model, optimizer, batches[:2])
        model.save_pretrained(tmp_path / family)
        loaded = type(model).from_pretrained(tmp_path / family, dtype=dtype)
        assert_same(dict(loaded.state_dict()), {k: v.cpu() for k, v in model.state_dict().items()})


def test_weights_cannot_be_assigned(make: Make) -> None:
    model, _ = make()
    with pytest.raises(MisuseError, match="use assign=False"):
        model.load_state_dict(model.state_dict(), assign=True)


# -- full_parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["load", "edit"])
def test_the_sign_of_a_zero_is_taken_over(how: str, dtype: torch.dtype, make: Make) -> None:
    """0 and -0 are equal, and have other bits."""
    for spec in SPECS:
        model, optimizer = make(spec, dtype)
        name = "transformer.wpe.weight"
        weight = model.state_dict()[name]
        for sign in (1.0, -1.0):
            zeros = torch.zeros_like(weight) * sign
            if how == "load":
                model.load_state_dict({name: zeros}, strict=False)
            else:
                with protrain.full_parameters(model.transformer.wpe), torch.no_grad():
                    model.transformer.wpe.weight.copy_(zeros)
            for value in (model.state_dict()[name], optimizer.export_parameter(name)["master"]):
                assert not value.any()
                assert (value.signbit() == (sign < 0)).all(), f"{spec}, {sign}"


def give(model: Any, weight: nn.Parameter, data: Tensor) -> None:
    with protrain.full_parameters(model), torch.no_grad():
        model.transformer.wte.weight.zero_()
        weight.data = data


def test_edits_without_values_are_refused_and_none_is_kept(make: Make) -> None:
    model, optimizer = make(SPECS[1], torch.bfloat16)
    weight, before = model.transformer.wpe.weight, states(model, optimizer)
    empty, sparse = torch.empty_like(weight, device="meta"), torch.ones(weight.shape).to_sparse()
    with pytest.raises(RuntimeError, match="no data"):  # by torch
        give(model, weight, empty)
    assert_same(states(model, optimizer), before)
    for data in (empty, sparse):
        with pytest.raises(RuntimeError, match='the parameter named "transformer'):
            model.load_state_dict({"transformer.wpe.weight": data}, strict=False)
        assert_same(states(model, optimizer), before)
    give(model, weight, sparse)
    assert model.state_dict()["transformer.wpe.weight"].eq(1.0).all()


@pytest.mark.parametrize("given", [nn.Linear(2, 2), torch.optim.AdamW(nn.Linear(2, 2).parameters())])
def test_full_parameters_needs_a_wrapped_model(given: Any) -> None:
    needed = rf"needs a model that protrain\.wrap returned, .* was given a {type(given).__name__}\."
    with pytest.raises(ValueError, match=needed), protrain.full_parameters(given):
        pass
