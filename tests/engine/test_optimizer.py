"""The wrapped optimizer does what torch's own does for schedulers, hooks and scalers; its groups stay as they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from protrain.common.errors import MisuseError
from tests.engine.harness import Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.residual import batches, make, unharmed

SPEC = Spec("none", "least", "nc", speculate=True)


def test_the_optimizer_that_was_wrapped_says_which_one_to_use() -> None:
    model = make()
    inner = adamw(model)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    model, optimizer = wrap_under(SPEC, model, inner, batches(1)[0])
    after = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    batch = batches(1)[0]
    default_loss(model, batch).backward()
    expected = states(model, optimizer)
    with pytest.raises(MisuseError, match=r"^step\(\) of an optimizer that protrain\.wrap did not return.*it returned"):
        inner.step()
    calls: dict[str, Any] = {
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
    with pytest.raises(MisuseError, match=r"in chunks: read them with optimizer\.state_dict\(\), and set them"):
        optimizer.state = {}
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
    model, optimizer = wrap_under(SPEC, model, inner, batches(1)[0])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scaler_is_told_what_to_do(dtype: torch.dtype) -> None:
    with unharmed(SPEC, dtype=dtype) as (model, optimizer):
        scaler = torch.amp.GradScaler("cpu")

        def step() -> None:
            scaler.scale(default_loss(model, batches(1)[0])).backward()
            scaler.step(optimizer)

        with pytest.raises(MisuseError, match=r"optimizer\.backward\(loss\).*torch\.amp\.GradScaler"):
            step()
        optimizer.zero_grad()


# -- groups ------------------------------------------------------------------------------------------------------------

Groups = list[dict[str, Any]]


def take_out(groups: Groups) -> None:
    groups[0]["params"].pop(1)


def move(groups: Groups) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(1))


def put_in(groups: Groups) -> None:
    groups[1]["params"].append(nn.Parameter(torch.ones(3)))


def append(groups: Groups) -> None:
    groups.append({**groups[0], "params": [nn.Parameter(torch.ones(3))]})


EDITS = [
    (take_out, r"blocks\.0\.first\.weight is in no group of .*, and was in group 0 .*requires_grad_\(False\)"),
    (move, r"blocks\.0\.first\.weight is in group 1 of optimizer\.param_groups, and was in group 0 when"),
    (put_in, r"a parameter of shape \(3,\) is in group 1 .*, and was in no group .*all groups before protrain\.wrap"),
    (append, r"a parameter of shape \(3,\) is in group 2 of optimizer\.param_groups, and was in no group when"),
]


@pytest.mark.parametrize("during_backward", [False, True])
def test_a_parameter_that_comes_or_goes_is_refused(during_backward: bool) -> None:
    def restore() -> None:
        del optimizer.param_groups[len(kept) :]
        for group, parameters in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = list(parameters)
        optimizer.zero_grad()

    with unharmed(SPEC, step_during_backward=during_backward) as (model, optimizer):
        kept = [list(group["params"]) for group in optimizer.param_groups]
        for edit, words in EDITS:
            edit(optimizer.param_groups)
            for call in (lambda: default_loss(model, batches(1)[0]).backward(), optimizer.state_dict):
                with pytest.raises(MisuseError, match=words):
                    call()
            restore()
            if not during_backward:
                default_loss(model, batches(1)[0]).backward()
                edit(optimizer.param_groups)
                with pytest.raises(MisuseError, match=words):
                    optimizer.step()
                restore()


def test_the_order_in_a_group_and_new_dicts_change_nothing() -> None:
    with unharmed(SPEC) as (_, optimizer):
        optimizer.param_groups = [{**group, "params": group["params"][::-1]} for group in optimizer.param_groups]
