"""The optimizer's groups: what they hold is fixed by wrapping, what they say is live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import CKPT, NONE, Loop, Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.residual import batches, make

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


def wrapped(**options: Any) -> tuple[nn.Module, ProTrainOptimizer]:
    model = make()
    spec = Spec("none", "least", (NONE, CKPT), speculate=True)
    return wrap_under(spec, model, adamw(model), batches(1)[0], device=torch.device("cpu"), **options)


@pytest.mark.parametrize("during_backward", [False, True])
def test_a_parameter_that_comes_or_goes_is_refused(during_backward: bool) -> None:
    model, optimizer = wrapped(step_during_backward=during_backward)
    kept = [list(group["params"]) for group in optimizer.param_groups]

    def restore() -> None:
        del optimizer.param_groups[len(kept) :]
        for group, parameters in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = list(parameters)

    for edit, words in EDITS:
        edit(optimizer.param_groups)
        for call in (lambda: default_loss(model, batches(1)[0]).backward(), optimizer.state_dict):
            with pytest.raises(MisuseError, match=words):
                call()
        restore()
        optimizer.zero_grad()
        if not during_backward:
            default_loss(model, batches(1)[0]).backward()
            edit(optimizer.param_groups)
            with pytest.raises(MisuseError, match=words):
                optimizer.step()
            restore()
            optimizer.zero_grad()
    untouched = wrapped(step_during_backward=during_backward)
    assert Loop().run(model, optimizer, batches(3)) == Loop().run(*untouched, batches(3))
    assert_same(states(model, optimizer), states(*untouched))


def test_the_order_in_a_group_and_new_dicts_change_nothing() -> None:
    model, optimizer = wrapped()
    optimizer.param_groups = [{**group, "params": group["params"][::-1]} for group in optimizer.param_groups]
    untouched = wrapped()
    assert Loop().run(model, optimizer, batches(3)) == Loop().run(*untouched, batches(3))
    assert_same(states(model, optimizer), states(*untouched))
