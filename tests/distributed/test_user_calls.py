"""Calls between steps on two ranks: those that one rank may make alone, and those that all must make."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors

import protrain
from tests.distributed.pool import on_ranks
from tests.distributed.test_user_generate import quick
from tests.distributed.test_user_wrap import WIDTH, Model, batch, wrap
from tests.engine.harness import seeded


def look(rank: int) -> tuple[list[float], str]:
    """What rank 1 alone sees between backward and step: norms of gradients, clipped norm, and texts."""
    with seeded():
        model, optimizer = wrap(Model())
    model(batch(rank)).backward()
    seen: list[float] = []
    text = ""
    if rank == 1:
        seen = [float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None]
        seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        text = f"{optimizer.report()} {optimizer.explain()} {optimizer.plan}"
    else:
        optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    seen.append(float(model(batch(5 + rank)).detach()))
    return seen, text


def test_what_one_rank_may_look_at_alone() -> None:
    with seeded():
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (sum(model(batch(rank)) for rank in range(2)) / 2).backward()
    norms = [float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None]
    norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    optimizer.step()
    (first, _), (seen, text) = on_ranks(2, look, timeout_s=150)
    assert first == [pytest.approx(model(batch(5)).item(), rel=1e-5)]
    assert seen == pytest.approx([*norms, model(batch(6)).item()], rel=1e-5)
    assert "between ranks" in text
    assert "world_size=2" in text


def penalty(model: Any) -> Tensor:
    """A term of the loss that is made of weights."""
    with protrain.full_parameters(model):
        return 1e-2 * torch.stack([weight.square().sum() for weight in model.parameters()]).sum()


def penalised(rank: int) -> dict[str, Tensor]:
    """The weights after two steps with such a term."""
    with seeded():
        model, optimizer = wrap(Model())
    for step in range(2):
        (model(batch(2 * step + rank)) + penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Tensor] = model.state_dict()
    return found


def test_a_term_made_of_weights_is_that_of_one_process() -> None:
    with seeded():
        model, optimizer = wrap(Model(), accumulation=2)
    for step in range(2):
        for rank in range(2):
            ((model(batch(2 * step + rank)) + penalty(model)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in on_ranks(2, penalised):
        assert found.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.equal(found[name], value), name


def error_of_an_early_term(rank: int) -> str:
    model, _ = wrap(Model())
    try:
        (penalty(model) + model(batch(rank))).backward()
    except protrain.MisuseError as error:
        return str(error)
    return ""


def test_a_term_made_of_weights_before_the_forward_is_refused_with_the_remedy() -> None:
    for error in on_ranks(2, error_of_an_early_term):
        assert "compute a term of the loss that is made of weights after the forward" in error


AVERAGED: dict[str, Callable[[list[Any]], Any]] = {
    "all_reduce": lambda gradients: [dist.all_reduce(gradient) for gradient in gradients],
    "all_gather": lambda gradients: dist.all_gather([torch.empty(1)] * 2, gradients[0]),
    "flatten_dense_tensors": _flatten_dense_tensors,  # as older loops do, to send all at once
}


def average_by_hand(rank: int, call: str) -> str:
    """The error of a script that averages gradients itself, as one without DistributedDataParallel does."""
    model, optimizer = wrap(Model())
    model(batch(rank)).backward()
    with pytest.raises(protrain.MisuseError) as raised:
        AVERAGED[call]([parameter.grad for parameter in model.parameters()])
    optimizer.zero_grad()
    return str(raised.value)


@pytest.mark.parametrize("call", AVERAGED)
def test_gradients_are_not_to_be_averaged_by_the_script(call: str) -> None:
    for said in on_ranks(2, average_by_hand, call, timeout_s=150):
        assert f"cannot be used here ({call}). It is that of all ranks already, so leave out what would" in said


def train_apart(rank: int, what: str) -> str:
    """In the second step rank 1 alone does ``what``. Returns the error of each rank. Both have caught one before."""
    with suppress(ValueError):
        wrap(Model(), accumulation=0)
    with seeded():
        model, optimizer = wrap(Model())
    try:
        for step in range(3):
            alone = rank == 1 and step == 1
            if alone and what == "set":
                optimizer.param_groups[0].update(lr=0.05, betas=(0.8, 0.999))
            model(batch(rank)).backward()
            if alone and what == "clip":
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    except protrain.MisuseError as error:
        return f"step {step}: {error}"
    return ""


def test_clipping_of_one_rank_alone_is_an_error_in_the_next_step() -> None:
    first, other = on_ranks(2, train_apart, "clip", timeout_s=150)
    assert first == other
    said = "step 2: rank 1 came to step() after clipping, while rank 0 came to step() without clipping. "
    assert first.startswith(said)


def test_hyperparameters_of_one_rank_alone_are_named() -> None:
    said = (
        "step 1: rank 1 has other hyperparameters than rank 0 (lr of group 0 is 0.05, not 0.01; beta1 of group 0 is "
        "0.8, not 0.9): set the same ones in every process"
    )
    assert on_ranks(2, train_apart, "set", timeout_s=150) == [said, said]


def part_in_the_last_step(rank: int, what: str) -> list[str]:
    """Rank 1 makes its last step otherwise than rank 0. Returns the errors."""
    with seeded():
        model, optimizer = wrap(Model())
    said = []
    try:
        for last in (False, True):
            model(batch(rank)).backward()
            if rank == 0 or not last or what != "no clipping":
                optimizer.clip_grad_norm_(0.05 if rank == 1 and last and what == "another limit" else 0.1)
            if rank == 0 or not last or what != "no step":
                optimizer.step()
            optimizer.zero_grad()
        if what == "another limit":
            model(batch(rank)).backward()
        model.state_dict()
    except protrain.MisuseError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no step", "rank 1 came to state_dict(), while rank 0 came to step() after clipping"),
        ("no clipping", "rank 1 came to step() without clipping, while rank 0 came to step() after clipping"),
        ("another limit", "in the last step rank 1 multiplied gradients by"),
    ],
)
def test_ranks_that_have_updated_their_parts_differently_give_no_state(what: str, said: str) -> None:
    for errors in on_ranks(2, part_in_the_last_step, what, timeout_s=150):
        (error,) = errors
        assert error.startswith(said)


def add_up(rank: int, under_no_sync: bool) -> str:
    """The error of a backward() under no_sync(), or of a second one without a step between."""
    model: Any
    model, optimizer = wrap(Model())
    try:
        with model.no_sync() if under_no_sync else nullcontext():
            for seed in (rank, 5 + rank):
                model(batch(seed)).backward()
    except protrain.MisuseError as error:
        optimizer.zero_grad()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("under_no_sync", "begins"), [(True, "a backward() under model.no_sync() in a step"), (False, "another backward()")]
)
def test_more_gradients_than_the_plan_has_sums_for_are_refused(under_no_sync: bool, begins: str) -> None:
    for error in on_ranks(2, add_up, under_no_sync):
        assert error.startswith(begins)
        assert "pass accumulation=2 or more to protrain.wrap" in error


def contrast(rank: int) -> str:
    """The error of a loss that takes two forwards of the model."""
    model, _ = wrap(Model())
    try:
        (model(batch(rank)) - 0.5 * model(batch(5 + rank))).backward()
    except protrain.MisuseError as error:
        return str(error)
    return ""


def test_a_loss_of_several_forwards_is_refused_with_the_remedy() -> None:
    for said in on_ranks(2, contrast):
        assert "wrap a module whose forward makes all calls of the model and returns the loss" in said


class Headed(torch.nn.Module):
    """A model whose loss takes the weight of its head, and which scores a batch by calling the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Model()
        self.middle = torch.nn.Linear(WIDTH, 8)
        self.head = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, score: bool = False) -> torch.Tensor:
        loss: torch.Tensor = self.body(x)
        x = self.middle(x)
        return self.head(x) + loss if score else loss + (x @ self.head.weight).square().mean() + self.head.bias.sum()


def score_and_train(rank: int, *, alone: bool, gradients: bool) -> tuple[list[torch.Tensor], str]:
    """Two steps with scores of the model before each and after them, or the error."""
    with seeded():
        model, optimizer = wrap(Headed())
    scores = []
    try:
        for step in range(3):
            with quick(), torch.set_grad_enabled(gradients):
                for other in range(0 if alone and rank else 2):
                    scores.append(model(batch(10 * step + 2 * other + rank), score=True).detach())
            model(batch(10 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except protrain.MisuseError as error:
        return [], str(error)
    return scores, ""


def test_a_module_that_the_training_never_calls() -> None:
    with seeded():
        model = Headed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected: list[list[torch.Tensor]] = [[], []]
    for step in range(3):
        for rank in range(2):
            for other in range(2):
                expected[rank].append(model(batch(10 * step + 2 * other + rank), score=True).detach())
        (sum(model(batch(10 * step + rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank, (scores, error) in enumerate(on_ranks(2, partial(score_and_train, alone=False, gradients=False))):
        assert not error
        for mine, theirs in zip(scores, expected[rank], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
    for _, error in on_ranks(2, partial(score_and_train, alone=False, gradients=True)):
        assert error.startswith("head was not called in the profiled step, so the ranks have no order for its backward")
    first, other_error = (error for _, error in on_ranks(2, partial(score_and_train, alone=True, gradients=False)))
    assert first == other_error
    assert "came to" in first
