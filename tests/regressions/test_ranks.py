"""Two processes that train together: the bits of the plain loop, and an error in both where they fall out of step."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn.functional import cross_entropy, linear, normalize
from torch.utils.checkpoint import checkpoint

import protrain
from tests.distributed.pool import errors_on, on_ranks
from tests.regressions.plain import (
    OFFLOADED,
    ON_DEVICE,
    WIDTH,
    Blocks,
    Plain,
    Script,
    assert_same,
    both_plans,
    check,
    left,
    rows,
    step,
    train,
    whole,
    wrapped,
)

pytestmark = pytest.mark.xdist_group("ranks")  # which shares the processes of the other tests of several ranks


# -- the bits of the plain loop ----------------------------------------------------------------------------------------


def loss_of(model: Any, seed: int, count: int = 4) -> Tensor:
    """The loss of a batch of this rank's own."""
    return model(rows(10 * seed + dist.get_rank(), count)).square().mean()


def contrast(model: Any, optimizer: Any) -> list[float]:
    """Embeddings of all ranks are compared, and their gradients go back to the ranks that computed them."""
    values = []
    for seed in range(3):
        x = rows(10 * seed + dist.get_rank())
        pooled = normalize(model(torch.cat((x, x + 0.1))), dim=-1)
        first, second = (torch.cat(all_gather(half.contiguous())) for half in pooled.chunk(2))
        values.append(step(optimizer, cross_entropy(5 * first @ second.T, torch.arange(len(first)))))
    return values


def grow(model: Any, optimizer: Any) -> list[float]:
    """Batches become longer than the planned one, on one rank more than on the other."""
    lengths = enumerate((2, 4, 6, 9))
    return [step(optimizer, loss_of(model, seed, count + seed * dist.get_rank())) for seed, count in lengths]


def penalise_weights(model: Any, optimizer: Any) -> list[float]:
    """A term of the loss is made of weights."""
    values = []
    for seed in range(2):
        loss = loss_of(model, seed)
        with whole(model, optimizer):
            term = torch.stack([weight.square().sum() for weight in model.parameters()]).sum()
        values.append(step(optimizer, loss + 1e-2 * term))
    return values


def penalise_gradients(model: Any, optimizer: Any) -> list[float]:
    """Gradient penalties did not train on several ranks."""
    values = []
    for seed in range(2):
        x = rows(10 * seed + dist.get_rank()).requires_grad_()
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
        values.append(step(optimizer, loss + gradient.square().sum()))
    return values


def look_alone(model: Any, optimizer: Any) -> list[float]:
    """Rank 1 alone looks at norms of gradients and at texts in the middle of each step."""

    def look() -> None:
        if dist.get_rank() == 1 and not isinstance(optimizer, Plain):
            assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
            text = f"{optimizer.report()} {optimizer.explain()} {optimizer.plan}"
            assert "between ranks" in text
            assert "world_size=2" in text

    return [step(optimizer, loss_of(model, seed), look) for seed in range(2)]


def differentiate_between(model: Any, optimizer: Any) -> list[float]:
    """On several ranks torch.autograd.grad between backward() and step() replaced the gradients by zeros."""

    def look() -> None:
        x = rows(5).requires_grad_()
        torch.autograd.grad(model(x).sum(), [x])
        optimizer.clip_grad_norm_(0.5)

    return [step(optimizer, loss_of(model, seed), look) for seed in range(3)]


SCRIPTS = contrast, grow, penalise_weights, penalise_gradients, look_alone, differentiate_between


def check_on_rank(rank: int, script: Script, plan: str) -> None:
    """A chunk of which a rank has nothing but padding, and speculative updates, ended the training in step two."""
    check(script, plan, plans={"n_speculate": 4})


@both_plans
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_the_bits_of_the_plain_loop(script: Script, plan: str) -> None:
    on_ranks(2, check_on_rank, script, plan)


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
    make, batch = partial(Blocks, Collective), rows(count=64)
    plan = wrapped(ON_DEVICE, make, batch)[1].plan
    room_bytes = plan.device_bytes + 4096  # two profiles of a model differ by some bytes; the larger batch needs more
    model, optimizer = wrapped(ON_DEVICE, make, batch, plan=plan, device_memory=room_bytes if tight else "4GiB")
    for count in (64, 64 + 8 * rank, 64):
        step(optimizer, model(rows(rank, count)).square().mean())
    return left(model, optimizer)


def test_all_ranks_recompute_where_one_has_a_larger_batch() -> None:
    """A rank with a larger batch recomputed blocks alone, and their collectives met others: a hang, or worse."""
    for tight, ample in zip(
        on_ranks(2, with_a_larger_batch, True), on_ranks(2, with_a_larger_batch, False), strict=True
    ):
        assert_same(tight, ample)


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


class Headed(Blocks):
    """It takes the weight of its head, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(super().forward(x), self.head.weight)


def with_a_term_of_weights_first(model: Any) -> Tensor:
    with protrain.full_parameters(model):
        term = torch.stack([weight.square().sum() for weight in model.parameters()]).sum()
    return term + loss_of(model, 0)


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(block, x.requires_grad_(), use_reentrant=True)
    return found


def averaged(model: Any, call: Callable[[list[Any]], Any]) -> Tensor:
    """A script averages gradients itself, as one without DistributedDataParallel does."""
    loss_of(model, 0).backward()
    call([parameter.grad for parameter in model.parameters()])
    return loss_of(model, 0)


# losses whose backward both ranks refuse, and what the error says
LOSSES: dict[str, tuple[Callable[[Any], Tensor], str]] = {
    "two forwards": (
        lambda model: loss_of(model, 0) - 0.5 * loss_of(model, 1),
        "wrap a module whose forward makes all calls of the model",
    ),
    "a term of weights first": (with_a_term_of_weights_first, "that is made of weights after the forward"),
    "the head alone": (lambda model: model.head(model(rows())).sum(), "head was not called in the profiled step"),
    "a checkpoint behind a block": (
        lambda model: checkpointed(model.blocks[1], model.blocks[0](rows())).sum(),
        "a second gradient of ",
    ),
    "a checkpoint before a block": (
        lambda model: model.blocks[1](checkpointed(model.blocks[0], rows())).sum(),
        "in a checkpoint that is not ProTrain's",
    ),
    "all_reduce": (lambda model: averaged(model, lambda gradients: dist.all_reduce(gradients[0])), "all ranks already"),
    # as older loops do, to send all at once
    "flatten": (lambda model: averaged(model, _flatten_dense_tensors), "all ranks already"),
}


def backward_of(rank: int, what: str) -> None:
    model, _ = wrapped(OFFLOADED, Headed)
    LOSSES[what][0](model).backward()


PARTED = r"^MisuseError: rank 1 came to {}, while rank 0 came to step\(\) after clipping"
# what both ranks run, its arguments, and the error of both
REFUSED: dict[str, tuple[Callable[..., object], tuple[Any, ...], str]] = {
    "an error": (
        fail_alone,
        (),
        "^(MisuseError: rank 1 has raised an .* in a forward, .*)?ArithmeticError: the script",
    ),
    "no step": (part_in_the_last_step, ("no step",), PARTED.format(r"state_dict\(\)")),
    "no clipping": (part_in_the_last_step, ("no clipping",), PARTED.format(r"step\(\) without clipping")),
    "another norm": (part_in_the_last_step, ("another norm",), "^MisuseError: in the last step rank 1 multiplied"),
    "averages": (average_alone, (), r"rank 0 came to AveragedWeights\.update\(\) with decay=0\.9"),
    "no planned sum": (sum_without_a_plan, (), r"^MisuseError(?=.*no_sync\(\))(?=.*accumulation)"),
    "buffers of different shapes": (with_own_features, (False, 1), "another buffer than rank .*features"),
    **{what: (backward_of, (what,), said) for what, (_, said) in LOSSES.items()},
}


@pytest.mark.parametrize("what", REFUSED)
def test_both_ranks_raise_an_error_and_none_waits_for_the_other(what: str) -> None:
    script, args, said = REFUSED[what]
    for error in errors_on(2, script, *args):
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
