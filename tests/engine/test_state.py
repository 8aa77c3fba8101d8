"""State of a training goes out and comes in, whole and exact: under any plan, and in torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import CheckpointError, MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import Batch, Loop, Spec, adamw, assert_same, default_loss, states, wrap_under

FIRST = Spec("none", "least", "cn")
SECOND = Spec("some", "middle", "snc", small=True)
RESIDENT = Spec("all", "least", "n")
SPECS = (FIRST, SECOND, RESIDENT)
LOOP = Loop(max_norm=0.5, scheduler=False)
Make = Callable[..., tuple[Any, ProTrainOptimizer]]


@pytest.fixture
def batches(tiny_batch: Callable[..., Batch]) -> list[Batch]:
    return [tiny_batch(seed=seed) for seed in range(7)]


@pytest.fixture
def make(tiny_model: Callable[..., nn.Module], batches: list[Batch], device: torch.device) -> Make:
    """``make(spec, dtype, family)``: a wrapped GPT-2 (with tied embeddings) or another family."""

    def make(spec: Spec = FIRST, dtype: torch.dtype = torch.float32, family: str = "gpt2") -> Any:
        model = tiny_model(family)
        return wrap_under(spec, model, adamw(model), batches[0], device=device, dtype=dtype)

    return make


def test_the_loss_scale_comes_with_the_state() -> None:
    (_, optimizer), (_, other) = (residual.wrapped(spec, dtype=torch.float16) for spec in (FIRST, SECOND))
    state = optimizer.state_dict()
    state["loss_scale"] = {"scale": 2.0**10, "finite_steps": 7, "skipped": 3}
    other.load_state_dict(state)
    assert other.state_dict()["loss_scale"] == state["loss_scale"]
    assert other.skipped_steps == 3


@pytest.mark.parametrize("loaded", [False, True])
def test_groups_say_how_weights_decay(loaded: bool) -> None:
    """As torch's Adam: an option that may be set at any time, and comes with the state of an AdamW."""
    x = torch.ones(4, 8)
    given = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.01, weight_decay=0.5).state_dict()

    def trained(*, wrapped: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.5)
        if wrapped:
            model, optimizer = protrain.wrap(model, optimizer, example_batch=(x,), device="cpu", progress=False)
        for step in range(6):
            if step == 3 and loaded:
                own = optimizer.state_dict()
                group = {**given["param_groups"][0], "params": own["param_groups"][0]["params"]}
                optimizer.load_state_dict({**own, "param_groups": [group]})
            elif step == 3:
                optimizer.param_groups[0]["decoupled_weight_decay"] = True
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected, found = trained(wrapped=False), trained(wrapped=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_training_moves_from_torch_and_back_with_its_states(spec: Spec, device: torch.device) -> None:
    """And so does the scheduler that was made before wrapping. To rounding, and without dropout."""

    def trained(*, moves: bool) -> tuple[list[float], dict[str, Tensor], float]:
        model = residual.make().to(device).eval()
        optimizer: Any = adamw(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        losses = []
        for step, (x,) in enumerate(residual.batches(9)):
            if moves and step == 3:
                model, optimizer = wrap_under(spec, model, optimizer, (x,), device=device)
                model.eval()
            if moves and step == 6:
                weights, state = model.state_dict(), optimizer.state_dict()
                model = residual.make().to(device).eval()
                optimizer = adamw(model)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
                scheduler.optimizer = optimizer
                assert {float(each["step"]) for each in optimizer.state.values()} == {6.0}
            loss = default_loss(model, (x.to(device),))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return losses, model.state_dict(), optimizer.param_groups[0]["lr"]

    losses, weights, rate = trained(moves=False)
    found = trained(moves=True)
    assert (found[0], found[2]) == (pytest.approx(losses, rel=1e-5), rate)
    torch.testing.assert_close(dict(found[1]), dict(weights), rtol=1e-4, atol=1e-5)


def half_a_step(state: dict[str, Any]) -> None:
    state["state"][3]["step"] += 0.5


def several_steps(state: dict[str, Any]) -> None:
    state["state"][3]["step"] = torch.ones(2)


def as_names(state: dict[str, Any]) -> None:
    """As a state that went through JSON has it."""
    state["state"] = {str(number): value for number, value in state["state"].items()}


def of_fewer(state: dict[str, Any]) -> None:
    del state["state"][state["param_groups"][0]["params"].pop()]


WRONG_STATES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (of_fewer, "load a state of the same model"),
    (as_names, "has an entry '0', which is none of the parameters in its groups"),
    (half_a_step, "step of blocks.1.first.weight must be a whole number from 0 on, not 1.5"),
    (several_steps, r"step of blocks.1.first.weight must be a whole number from 0 on, not \[1.0, 1.0\]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_STATES)
def test_what_is_no_state_of_adam_changes_nothing(
    change: Callable[[dict[str, Any]], Any], message: str, device: torch.device
) -> None:
    """Moments that would silently begin anew, and errors when half of them were loaded."""
    with residual.unharmed(FIRST, steps=1, device=device) as (_, optimizer):
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 17.0
        change(state)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)


def test_moments_begin_anew_where_a_state_has_none(device: torch.device) -> None:
    """As the message about optimizer.state says, and as in torch."""
    data, loop = residual.batches(2), Loop(scheduler=False)
    fresh, trained = (residual.wrapped(FIRST, device=device) for _ in range(2))
    loop.run(*trained, data)
    model, optimizer = trained
    model.load_state_dict(fresh[0].state_dict())
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert loop.run(*trained, data) == loop.run(*fresh, data)
    assert_same(states(*trained), states(*fresh))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_what_is_frozen_now_has_the_weights_it_was_trained_to(device: torch.device, tmp_path: Path) -> None:
    wrapped, optimizer = residual.wrapped(FIRST, device=device)
    Loop().run(wrapped, optimizer, residual.batches(3))
    protrain.save_checkpoint(tmp_path, wrapped, optimizer)
    expected = {name: value.clone() for name, value in wrapped.state_dict().items()}
    frozen = residual.make()
    frozen.get_submodule("blocks.1").requires_grad_(False)
    again, other = wrap_under(FIRST, frozen, adamw(frozen), residual.batches(1)[0], device=device)
    protrain.load_checkpoint(tmp_path, again, other)
    assert_same(dict(again.state_dict()), expected)


def test_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    """Their options would become those of other parameters."""
    protrain.save_checkpoint(tmp_path, *residual.wrapped(FIRST))
    model = residual.make()
    optimizer = adamw(model)
    optimizer.param_groups.reverse()
    other = wrap_under(FIRST, model, optimizer, residual.batches(1)[0])
    before = states(*other)
    words = r"of another optimizer: enter\.bias is in group 1 of its param_groups, and in group 0 here"
    with pytest.raises(CheckpointError, match=words):
        protrain.load_checkpoint(tmp_path, *other)
    assert_same(states(*other), before)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_state_dict_is_that_of_the_unwrapped_model(
    spec: Spec, make: Make, tiny_model: Callable[..., nn.Module]
) -> None:
    (model, _), plain = make(spec, family="t5"), tiny_model("t5")
    found, expected = model.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    assert vars(found) == vars(expected)  # the versions of modules
    for name in ("", "encoder.block.0.layer.0", "lm_head"):
        part = model.get_submodule(name).state_dict()
        assert_same({k: v.cpu() for k, v in part.items()}, plain.get_submodule(name).state_dict())
    tiny_model("t5", seed=5).load_state_dict(found, strict=True)
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
    assert model.lm_head.weight is model.transformer.wte.weight


def test_values_that_say_more_than_a_weight_holds_become_the_master(device: torch.device) -> None:
    wrapped, optimizer = residual.wrapped(FIRST, device=device, dtype=torch.bfloat16)
    name = "blocks.1.first.weight"
    finer = wrapped.state_dict()[name].float() * (1 + 2.0**-12)
    wrapped.load_state_dict({name: finer}, strict=False)
    assert torch.equal(optimizer.export_parameter(name)["master"], finer.cpu())
    wrapped.load_state_dict({name: finer.bfloat16()}, strict=False)
    assert torch.equal(optimizer.export_parameter(name)["master"], finer.cpu()), "the same weight says nothing new"


def test_weights_cannot_be_assigned(make: Make) -> None:
    model, _ = make()
    with pytest.raises(MisuseError, match="use assign=False"):
        model.load_state_dict(model.state_dict(), assign=True)


# -- full_parameters ---------------------------------------------------------------------------------------------------


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
