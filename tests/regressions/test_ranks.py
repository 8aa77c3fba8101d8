"""Two processes that train together: the bits of one process, and an error in both where they fall out of step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

import protrain
from tests.regressions.plain import (
    OFFLOADED,
    ON_DEVICE,
    WIDTH,
    Blocks,
    adamw,
    assert_same,
    both_plans,
    left,
    plain,
    rows,
    train,
    wrapped,
)
from tests.regressions.ranks import end, on_ranks

pytestmark = pytest.mark.xdist_group("regressions on ranks")  # which share two processes


# -- the bits of one process -------------------------------------------------------------------------------------------

Backward = Callable[[Any, Tensor], Tensor]


def usual(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def penalty(model: Any, x: Tensor) -> Tensor:
    x.requires_grad_()
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
    return loss + gradient.square().sum()


def steps(model: nn.Module, optimizer: Any, ranks: tuple[int, ...], loss_of: Backward, between: bool) -> None:
    """Three steps, each with a batch of every one of ``ranks``."""
    for step in range(3):
        for rank in ranks:
            loss = loss_of(model, rows(10 * step + rank))
            (loss * 0.5 if len(ranks) > 1 else loss).backward()  # to halve is exact, and a mean of two halves their sum
        if between:
            x = rows(5 + ranks[0]).requires_grad_()
            torch.autograd.grad(model(x).sum(), [x])
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def left_by_rank(rank: int, plan: str, loss_of: Backward, between: bool, n_speculate: int = 0) -> Any:
    model, optimizer = wrapped(plan, plans={"n_speculate": n_speculate})
    steps(model, optimizer, (rank,), loss_of, between)
    return left(model, optimizer)


def check(plan: str, loss_of: Backward = usual, between: bool = False, n_speculate: int = 0) -> None:
    model, optimizer = plain()
    steps(model, optimizer, (0, 1), loss_of, between)
    for found in on_ranks(left_by_rank, plan, loss_of, between, n_speculate):
        assert_same(found, left(model, optimizer))


@both_plans
def test_autograd_grad_before_a_step_leaves_the_gradients_of_the_step(plan: str) -> None:
    """On several ranks torch.autograd.grad between backward() and step() replaced the gradients by zeros."""
    check(plan, between=True)


def test_a_gradient_penalty_trains() -> None:
    """Gradient penalties did not train on several ranks."""
    check(OFFLOADED, penalty)


def test_a_rank_may_have_nothing_of_a_chunk() -> None:
    """A chunk of which a rank has nothing but padding, and speculative updates, ended the training in step two."""
    check(OFFLOADED, n_speculate=4)


class Fourier(Blocks):
    """Random features that each process draws for itself."""

    def __init__(self, seed: int, count: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(count, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.get_buffer("features")[:WIDTH])


def with_own_features(rank: int, late: bool, longer: int = 0) -> Any:
    model, optimizer = wrapped(ON_DEVICE, lambda: Fourier(rank, WIDTH + longer * rank), late=late)
    train(model, optimizer)
    return model.state_dict()


@pytest.mark.parametrize("late", [False, True])
def test_buffers_are_those_of_the_first_rank(late: bool) -> None:
    """Buffers that differ between processes stayed different on every rank, which trained different models."""
    first, other = on_ranks(with_own_features, late)
    assert_same(other, first)
    assert torch.equal(first["features"], Fourier(0).get_buffer("features"))


def test_buffers_of_different_shapes_are_refused() -> None:
    """Buffers of different shapes are refused on every rank, which name them."""
    for error in on_ranks(with_own_features, False, 1, raises=True):
        assert "another buffer than rank" in error
        assert "features" in error


class Collective(nn.Module):
    """A block that subtracts the mean over all processes, as a SyncBatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x - all_reduce(x.mean(0)) / 2


def with_a_larger_batch(rank: int, tight: bool) -> Any:

    def make() -> nn.Module:
        return Blocks(Collective)

    plan = wrapped(ON_DEVICE, make, rows(count=64))[1].plan
    room_bytes = plan.device_bytes + 4096  # two profiles of a model differ by some bytes; the larger batch needs more
    options = {"plan": plan, "device": "cpu", "device_memory": room_bytes if tight else "4GiB"}
    model = make()
    model, optimizer = protrain.wrap(model, adamw(model), example_batch=rows(count=64), progress=False, **options)
    for count in (64, 64 + 8 * rank, 64):
        model(rows(rank, count)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return left(model, optimizer)


def test_all_ranks_recompute_where_one_has_a_larger_batch() -> None:
    """A rank with a larger batch recomputed blocks alone, and their collectives met others: a hang, or worse."""
    for tight, ample in zip(on_ranks(with_a_larger_batch, True), on_ranks(with_a_larger_batch, False), strict=True):
        assert_same(tight, ample)


def save_and_go_on(rank: int, folder: Path, saves: bool) -> Any:
    model, optimizer = wrapped(ON_DEVICE if saves else OFFLOADED)
    if saves:
        steps(model, optimizer, (rank,), usual, False)
        protrain.save_checkpoint(folder, model, optimizer)
    else:
        protrain.load_checkpoint(folder, model, optimizer)
    before = left(model, optimizer)
    steps(model, optimizer, (rank,), usual, False)
    return before, left(model, optimizer)


def test_a_save_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    """A checkpoint loads with any number of processes, under any plan, and training goes on with the same bits."""
    (before, after), _ = on_ranks(save_and_go_on, tmp_path, True)
    model, optimizer = wrapped(OFFLOADED, accumulation=2)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    assert_same(left(model, optimizer), before)
    protrain.save_checkpoint(tmp_path / "of one", model, optimizer)
    steps(model, optimizer, (0, 1), usual, False)
    assert_same(left(model, optimizer), after)
    for found in on_ranks(save_and_go_on, tmp_path / "of one", False):
        assert_same(found, (before, after))


def beside_a_group_of_its_own(rank: int) -> Any:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    return train(*wrapped(ON_DEVICE))


def test_a_rank_may_belong_to_more_groups_than_another() -> None:
    """wrap waited for the timeout of the process group where one rank belonged to more process groups than another."""
    first, other = on_ranks(beside_a_group_of_its_own)
    assert first == other == train(*wrapped(ON_DEVICE))


# -- out of step -------------------------------------------------------------------------------------------------------


def fail(*_: Any) -> None:
    raise ArithmeticError("the script of rank 1")


def fail_alone(rank: int) -> None:
    """Both fail together and go on. Then rank 1 fails alone."""
    model, optimizer = wrapped(OFFLOADED)
    handle = model.get_submodule("blocks.0").register_forward_pre_hook(fail)
    with suppress(ArithmeticError):
        model(rows(rank))
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    if rank == 1:
        model.get_submodule("blocks.2").register_forward_hook(fail)
    train(model, optimizer, 2)


def test_an_error_of_one_rank_is_told_on_the_other() -> None:
    """An error of one rank was not told where both had raised and caught one before, and the others waited."""
    other, own = on_ranks(fail_alone, raises=True)
    assert own == "ArithmeticError: the script of rank 1"
    assert other.startswith("MisuseError: rank 1 has raised an exception in a forward, while rank 0")
    assert other.endswith(own)


def part_and_begin_anew(rank: int) -> Any:
    model, optimizer = wrapped(OFFLOADED)
    train(model, optimizer, 1)
    if rank == 0:
        model(rows())
    with pytest.raises(protrain.MisuseError) as caught:
        train(model, optimizer)
    return str(caught.value), train(*wrapped(ON_DEVICE))


def test_both_ranks_may_begin_anew_after_they_were_out_of_step() -> None:
    """A training that began anew after an error could hang, as one rank had not heard of the error yet."""
    for error, losses in on_ranks(part_and_begin_anew):
        assert "rank 1 came to a backward, while rank 0 came to a forward" in error
        assert losses == train(*wrapped(ON_DEVICE))


def part_in_the_last_step(rank: int, what: str) -> None:
    model, optimizer = wrapped(OFFLOADED)
    for last in (False, True):
        alone = rank == 1 and last
        model(rows(rank)).square().mean().backward()
        if not (alone and what == "no clipping"):
            optimizer.clip_grad_norm_(0.05 if alone and what == "another norm" else 0.1)
        if not (alone and what == "no step"):
            optimizer.step()
        optimizer.zero_grad()
    if what == "another norm":
        model(rows(rank)).square().mean().backward()
    model.state_dict()


PARTS = {
    "no step": "rank 1 came to state_dict(), while rank 0 came to step() after clipping",
    "no clipping": "rank 1 came to step() without clipping, while rank 0 came to step() after clipping",
    "another norm": "in the last step rank 1 multiplied gradients by",
}


@pytest.mark.parametrize("what", PARTS)
def test_ranks_that_part_in_the_last_step_give_no_state(what: str) -> None:
    """A last step that one rank skipped, or clipped otherwise, left a model of old and new parts without a word."""
    for error in on_ranks(part_in_the_last_step, what, raises=True):
        assert error.startswith(f"MisuseError: {PARTS[what]}")


def average_alone(rank: int) -> None:
    model, optimizer = wrapped(OFFLOADED)
    averaged = protrain.AveragedWeights(model, decay=0.9)
    train(model, optimizer, 1)
    averaged.update()
    train(model, optimizer, 1)
    if rank == 0:
        averaged.update()
    averaged.state_dict()


def test_averages_that_one_rank_alone_updates_are_refused() -> None:
    """AveragedWeights.update() on one rank alone mixed averages of different steps without a word."""
    for error in on_ranks(average_alone, raises=True):
        assert "rank 0 came to AveragedWeights.update() with decay=0.9" in error


def sum_without_a_plan(rank: int) -> None:
    model, _ = wrapped(OFFLOADED)
    for _ in range(2):
        with model.no_sync():
            model(rows(rank)).square().mean().backward()


def test_a_backward_under_no_sync_without_a_planned_sum_names_no_sync() -> None:
    """The error for a backward() under no_sync() that the plan has no sums for spoke of zero_grad()."""
    for error in on_ranks(sum_without_a_plan, raises=True):
        assert error.startswith("MisuseError")
        assert "no_sync()" in error
        assert "accumulation" in error


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1.0, 1.0)


def refused_in_its_middle(rank: int, plan: str) -> Any:
    """A second backward is refused, where updates would be inside of it. Nothing is updated before."""
    model, optimizer = wrapped(plan, accumulation=2, step_during_backward=True)
    before = left(model, optimizer)
    model.get_parameter("blocks.0.0.weight").register_post_accumulate_grad_hook(clamp)
    with model.no_sync():
        model(rows(rank)).square().mean().backward()
    with pytest.raises(protrain.MisuseError, match=r"^blocks\.0\.0\.weight has a hook"):
        model(rows(rank + 2)).square().mean().backward()
    return before, left(model, optimizer)


@both_plans
def test_a_refused_backward_has_updated_nothing(plan: str) -> None:
    """A backward that was refused in its middle had already updated weights by the gradients of earlier batches."""
    for before, after in on_ranks(refused_in_its_middle, plan):
        assert_same(after, before)


# -- ends, so these tests are the last ---------------------------------------------------------------------------------


def save_beyond_the_group(rank: int, folder: Path) -> Any:
    group = dist.new_group()
    model, optimizer = wrapped(OFFLOADED, process_group=group)
    train(model, optimizer)
    saved = protrain.async_save(folder, model, optimizer)
    state = left(model, optimizer)
    dist.destroy_process_group(group)
    saved.result()
    return state


def test_an_async_save_is_written_though_the_group_has_ended(tmp_path: Path) -> None:
    """An async_save was lost where the script ended the process group before the save was written."""
    states = on_ranks(save_beyond_the_group, tmp_path)
    model, optimizer = wrapped(ON_DEVICE)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    for state in states:
        assert_same(left(model, optimizer), state)


def be_killed(rank: int) -> None:
    model, optimizer = wrapped(ON_DEVICE)
    train(model, optimizer, 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer, 100)


def test_a_rank_that_dies_is_named_within_seconds() -> None:
    """When a rank died, the others waited for half an hour or for ever."""
    (error,) = on_ranks(be_killed, raises=True, lost=1)
    end()
    assert "rank 1 has" in error
