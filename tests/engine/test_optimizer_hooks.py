"""The wrapped optimizer does what torch's own does for schedulers, hooks and scalers that meet it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    FEW_PLANS,
    NONE,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.residual import batches, make

CPU = torch.device("cpu")


def wrapped(
    optimizer: torch.optim.Optimizer | None = None, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, ProTrainOptimizer]:
    model = make() if model is None else model
    spec = Spec("none", "least", (NONE,))
    return wrap_under(
        spec, model, adamw(model) if optimizer is None else optimizer, batches(1)[0], device=CPU, **options
    )


def test_the_optimizer_that_was_wrapped_says_which_one_to_use() -> None:
    model = make()
    inner = adamw(model)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    model, optimizer = wrapped(inner, model)
    after = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    batch = batches(1)[0]
    default_loss(model, batch).backward()
    expected = states(model, optimizer)
    calls: dict[str, Any] = {
        "step": inner.step,
        "zero_grad": inner.zero_grad,
        "state_dict": inner.state_dict,
        "load_state_dict": lambda: inner.load_state_dict({}),
        "add_param_group": lambda: inner.add_param_group({"params": [torch.zeros(1)]}),
    }
    for name, call in calls.items():
        with pytest.raises(
            MisuseError, match=rf"^{name}\(\) of the optimizer that protrain\.wrap was given.*it returned"
        ):
            call()
    assert_same(states(model, optimizer), expected)
    rates = [group["lr"] for group in optimizer.param_groups]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        before.step()
        after.step()
    assert [group["lr"] for group in optimizer.param_groups] == [rate / 4 for rate in rates]
    assert inner.param_groups is optimizer.param_groups


def test_hooks_on_the_state_see_it_and_may_change_it() -> None:
    model = make()
    inner = adamw(model)
    calls: list[str] = []

    def saved(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append("saved")
        return {**state, "note": "mine"}

    def loading(_: Any, state: dict[str, Any]) -> None:
        calls.append(f"loading {state.pop('note')}")
        state["param_groups"] = [{**group, "lr": 7.0} for group in state["param_groups"]]

    inner.register_state_dict_pre_hook(lambda _: calls.append("saving"))  # one of before wrapping
    inner.register_step_pre_hook(lambda *_: calls.append("step"))
    model, optimizer = wrapped(inner, model)
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    default_loss(model, batches(1)[0]).backward()
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert calls == ["step", "saving", "saved", "loading mine", "loaded"]
    assert state["note"] == "mine"
    assert [group["lr"] for group in optimizer.param_groups] == [7.0, 7.0]


def test_hooks_on_the_state_are_not_called_by_wrapping() -> None:
    def stepped() -> tuple[torch.optim.Optimizer, nn.Module]:
        torch.manual_seed(0)
        model = make()
        inner = adamw(model)
        default_loss(model, batches(1)[0]).backward()
        inner.step()
        inner.zero_grad()
        return inner, model

    inner, model = stepped()
    inner.register_state_dict_post_hook(lambda *_: {"state": {}, "param_groups": []})
    expected = wrapped(*stepped())
    assert_same(states(*wrapped(inner, model)), states(*expected))


def test_steps_are_counted_and_nothing_else() -> None:
    model, optimizer = wrapped()
    Loop().run(model, optimizer, batches(2))
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.report().steps == 2
    model, optimizer = wrapped(dtype=torch.float16)
    optimizer.backward(default_loss(model, batches(1)[0]) * float("inf"))
    optimizer.step()
    assert optimizer.report().steps == 0


@pytest.mark.parametrize(("dtype", "specs"), [(torch.float32, FEW_PLANS[::2]), (torch.bfloat16, FEW_PLANS[1::2])])
def test_a_gradient_hook_of_before_wrapping_has_the_gradient(
    dtype: torch.dtype, specs: Sequence[Spec], device: torch.device
) -> None:
    def hooked() -> nn.Module:
        model = make()
        model.get_parameter("blocks.1.first.weight").register_post_accumulate_grad_hook(halve)
        model.get_parameter("blocks.2.first.weight").register_post_accumulate_grad_hook(negate)
        return model

    check_equal_to_plain(hooked, batches(2), device=device, dtype=dtype, specs=specs)


def test_a_gradient_hook_of_before_wrapping_may_forget_the_gradient() -> None:
    model = make()
    model.get_parameter("leave.bias").register_post_accumulate_grad_hook(forget)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = wrapped(None, model)
    Loop().run(model, optimizer, batches(2))
    after = model.state_dict()
    assert [name for name in before if torch.equal(before[name], after[name])] == ["leave.bias"]


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def negate(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = -parameter.grad


def forget(parameter: Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scaler_is_told_what_to_do(dtype: torch.dtype) -> None:
    model, optimizer = wrapped(dtype=dtype)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        scaler.scale(default_loss(model, batches(1)[0])).backward()
        scaler.step(optimizer)

    with pytest.raises(MisuseError, match=r"optimizer\.backward\(loss\).*torch\.amp\.GradScaler"):
        step()
    optimizer.zero_grad()
    untouched = wrapped(dtype=dtype)
    assert Loop().run(model, optimizer, batches(2)) == Loop().run(*untouched, batches(2))
    assert_same(states(model, optimizer), states(*untouched))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("of_all", [True, False])
def test_a_second_optimizer_says_that_it_cannot_train(
    kind: type[torch.optim.AdamW | torch.optim.SGD], of_all: bool
) -> None:
    """Scripts with an optimizer for embeddings and one for the rest, and optimizers made after wrapping."""
    model = make()
    rest = torch.optim.AdamW(model.get_submodule("blocks").parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match=r"Another optimizer cannot train them: give this one a group"):
        model, optimizer = wrapped(rest, model)
    second = kind(model.parameters() if of_all else model.get_submodule("enter").parameters(), lr=1e-3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    default_loss(model, batches(1)[0]).backward()
    with pytest.raises(
        MisuseError, match=r"step\(\) of an optimizer that protrain\.wrap did not return.*enter\.weight.*a group"
    ):
        second.step()
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    optimizer.step()
