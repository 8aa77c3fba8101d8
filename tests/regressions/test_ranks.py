"""Two processes that train together: the bits of one process, and an error in both where they fall out of step."""

from __future__ import annotations

import os
import re
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
from tests.distributed.pool import RankError, on_ranks
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

pytestmark = pytest.mark.xdist_group("ranks")  # which shares the processes of the other tests of several ranks


def error_of(rank: int, script: Callable[..., object], *args: Any) -> str:
    """The error that ``script`` raises."""
    with pytest.raises((ArithmeticError, ValueError, protrain.MisuseError)) as caught:
        script(rank, *args)
    return f"{caught.type.__name__}: {caught.value}"


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
    for found in on_ranks(2, left_by_rank, plan, loss_of, between, n_speculate):
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
    first, other = on_ranks(2, with_own_features, late)
    assert_same(other, first)
    assert torch.equal(first["features"], Fourier(0).get_buffer("features"))


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
    for tight, ample in zip(
        on_ranks(2, with_a_larger_batch, True), on_ranks(2, with_a_larger_batch, False), strict=True
    ):
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
    (before, after), _ = on_ranks(2, save_and_go_on, tmp_path, True)
    model, optimizer = wrapped(OFFLOADED, accumulation=2)
    protrain.load_checkpoint(tmp_path, model, optimizer)
    assert_same(left(model, optimizer), before)
    protrain.save_checkpoint(tmp_path / "of one", model, optimizer)
    steps(model, optimizer, (0, 1), usual, False)
    assert_same(left(model, optimizer), after)
    for found in on_ranks(2, save_and_go_on, tmp_path / "of one", False):
        assert_same(found, (before, after))


def beside_a_group_of_its_own(rank: int) -> Any:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    return train(*wrapped(ON_DEVICE))


def test_a_rank_may_belong_to_more_groups_than_another() -> None:
    """wrap waited for the timeout of the process group where one rank belonged to more process groups than another."""
    first, other = on_ranks(2, beside_a_group_of_its_own)
    assert first == other == train(*wrapped(ON_DEVICE))


# -- out of step -------------------------------------------------------------------------------------------------------


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
    for error, losses in on_ranks(2, part_and_begin_anew):
        assert "rank 1 came to a backward, while rank 0 came to a forward" in error
        assert losses == train(*wrapped(ON_DEVICE))


def fail(*_: Any) -> None:
    raise ArithmeticError("the script of rank 1")


def fail_alone(rank: int) -> None:
    """Both fail together and go on. Then rank 1 fails alone, which was not told on the other."""
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


def part_in_the_last_step(rank: int, what: str) -> None:
    """A last step that one rank skipped, or clipped otherwise, left a model of old and new parts without a word."""
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


def average_alone(rank: int) -> None:
    """AveragedWeights.update() on one rank alone mixed averages of different steps without a word."""
    model, optimizer = wrapped(OFFLOADED)
    averaged = protrain.AveragedWeights(model, decay=0.9)
    train(model, optimizer, 1)
    averaged.update()
    train(model, optimizer, 1)
    if rank == 0:
        averaged.update()
    averaged.state_dict()


def sum_without_a_plan(rank: int) -> None:
    """The error for a backward() under no_sync() that the plan has no sums for spoke of zero_grad()."""
    model, _ = wrapped(OFFLOADED)
    for _ in range(2):
        with model.no_sync():
            model(rows(rank)).square().mean().backward()


PARTED = r"^MisuseError: rank 1 came to {}, while rank 0 came to step\(\) after clipping"
# the error of both ranks, what they run, and its arguments
REFUSED: dict[str, tuple[str, Callable[..., object], tuple[Any, ...]]] = {
    "an error": (
        "^(MisuseError: rank 1 has raised an .* in a forward, .*)?ArithmeticError: the script",
        fail_alone,
        (),
    ),
    "no step": (PARTED.format(r"state_dict\(\)"), part_in_the_last_step, ("no step",)),
    "no clipping": (PARTED.format(r"step\(\) without clipping"), part_in_the_last_step, ("no clipping",)),
    "another norm": ("^MisuseError: in the last step rank 1 multiplied", part_in_the_last_step, ("another norm",)),
    "averages": (r"rank 0 came to AveragedWeights\.update\(\) with decay=0\.9", average_alone, ()),
    "no planned sum": (r"^MisuseError(?=.*no_sync\(\))(?=.*accumulation)", sum_without_a_plan, ()),
    "buffers of different shapes": ("another buffer than rank .*features", with_own_features, (False, 1)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_both_ranks_raise_an_error_and_none_waits_for_the_other(what: str) -> None:
    said, script, args = REFUSED[what]
    for error in on_ranks(2, error_of, script, *args):
        assert re.search(said, error, flags=re.DOTALL), error


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
    for before, after in on_ranks(2, refused_in_its_middle, plan):
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
    states = on_ranks(2, save_beyond_the_group, tmp_path)
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


def test_a_rank_that_dies_is_named() -> None:
    """When a rank died, the others waited for half an hour or for ever."""
    with pytest.raises(RankError) as caught:
        on_ranks(2, be_killed)
    assert caught.value.by_rank[1] == "the process died"
    assert str(caught.value.by_rank[0]).startswith("MisuseError: rank 1 has")
