"""Ranks that do not run the same units: text beside images, frozen parts, evaluation, more calls than profiled."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import on_ranks
from tests.distributed.test_bits import check
from tests.distributed.training import Training
from tests.engine import residual
from tests.engine.harness import CKPT, NONE, SWAP, Spec, adamw, assert_same, default_loss, seeded, states, wrap_under

WIDTH, VOCABULARY = 32, 64
SPECS = (Spec("all", "all", (NONE,)), Spec("some", "least", (CKPT, NONE), small=True), Spec("none", "least", (SWAP,)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Tower(nn.Module):
    """Blocks between parameters of the tower's own, as vision transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return x * self.gain


class TextAndImages(nn.Module):
    """A language model whose batches may come with an image for a tower of its own."""

    def __init__(self, *, freeze: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.tower = Tower()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if freeze:
            self.blocks.requires_grad_(False)

    def forward(self, ids: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if image is not None:
            x = x + self.tower(image)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) + self.bias
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def make(*, freeze: bool = False) -> nn.Module:
    with seeded():
        return TextAndImages(freeze=freeze)


def batches(count: int) -> list[dict[str, Tensor]]:
    """The first has an image, some of the others have one, and there are steps in which no rank has one."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for index in range(count):
        batch = {"ids": torch.randint(0, VOCABULARY, (2, 8), generator=generator)}
        if index % 3 == 0 or index % 7 == 1:
            batch["image"] = torch.randn(2, 8, WIDTH, generator=generator)
        found.append(batch)
    return found


@pytest.mark.slow
def test_the_first_gradient_of_a_unit_comes_with_the_second_backward_of_a_step() -> None:
    check(2, Training(make, batches, dtype="bfloat16", reduction="sum", steps=3, accumulate=2), SPECS)


@pytest.mark.slow
def test_units_that_some_ranks_skip() -> None:
    for size, dtype, specs in ((2, "bfloat16", SPECS), (3, "float32", SPECS[1:])):
        check(size, Training(make, batches, dtype=dtype, reduction="sum", steps=4), specs)


def growing(count: int) -> list[dict[str, Tensor]]:
    """After the first step all but every third batch are longer than planned, so that ranks differ in it."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(count):
        length = 9 if index > 2 and index % 3 else 8
        found.append({"ids": torch.randint(0, VOCABULARY, (2, length), generator=generator)})
        if index == 0 or index % 5 == 1:
            found[-1]["image"] = torch.randn(2, 8, WIDTH, generator=generator)
    return found


@pytest.mark.filterwarnings("ignore:.*every block is recomputed")
def test_one_rank_recomputes_what_another_keeps_as_its_batch_is_longer() -> None:
    check(2, Training(make, growing, dtype="bfloat16", steps=5, tight=True), SPECS[:1])


@pytest.mark.slow
def test_updates_inside_backward_of_units_that_some_ranks_skip() -> None:
    check(2, Training(make, batches, dtype="bfloat16", steps=4, inside=True, max_norm=None), SPECS[::2])


def train_with_gradients_of_inputs(rank: int, size: int, inside: bool) -> dict[str, Tensor]:
    """``size`` ranks, or one with as many micro-batches, train with a penalty on gradients, and look at gradients."""
    count = 2 // size
    model = residual.make(depth=3)
    for block in model.get_submodule("blocks").modules():
        if isinstance(block, nn.Dropout):
            block.p = 0.0  # it would be drawn otherwise by several ranks
    data = residual.batches(6)
    options: dict[str, Any] = {"gradient_reduction": "sum", "accumulation": count, "step_during_backward": inside}
    wrapped, optimizer = wrap_under(
        SPECS[1], model, adamw(model), data[0], device=torch.device("cpu"), world_size=size, **options
    )

    def look(inputs: Tensor) -> None:
        inputs = inputs.clone().requires_grad_()
        assert torch.autograd.grad(wrapped(inputs).sum(), inputs)[0].any()

    own = data[rank::size]
    for at, (inputs,) in enumerate(own):
        is_last = at % count == count - 1
        look(inputs)
        inputs = inputs.clone().requires_grad_()
        output = wrapped(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        no_sync: Any = nullcontext if is_last else wrapped.no_sync
        with no_sync():
            (output.square().mean() + slope.square().mean()).backward()
        if is_last:
            if not inside:
                look(inputs.detach())
                optimizer.clip_grad_norm_(0.1)
                look(inputs.detach())
            optimizer.step()
            optimizer.zero_grad()
    return states(wrapped, optimizer)


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_inputs_leave_those_of_parameters(inside: bool) -> None:
    """torch.autograd.grad goes backward through all units, and brings nothing that ranks could reduce."""
    expected = train_with_gradients_of_inputs(0, 1, inside)
    for found in on_ranks(2, train_with_gradients_of_inputs, 2, inside):
        assert_same(found, expected)


def test_frozen_blocks() -> None:
    check(2, Training(functools.partial(make, freeze=True), batches, dtype="bfloat16", steps=4), SPECS[1:])


def peak_on_rank(rank: int) -> tuple[int, int]:
    """The most device memory of steps of one of two ranks that update inside backward, and what was planned."""
    with seeded():
        model: Any = make()
    data = batches(4)
    wrapped, optimizer = wrap_under(
        SPECS[0],
        model,
        adamw(model),
        data[0],
        device=torch.device("cpu"),
        tight=True,
        world_size=2,
        step_during_backward=True,
    )
    for batch in data[rank::2]:
        default_loss(wrapped, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = optimizer.report()
    return report.device_bytes, report.predicted_device_bytes


def test_chunks_that_are_updated_inside_backward_share_memory_for_their_gradients() -> None:
    for peak_bytes, planned_bytes in on_ranks(2, peak_on_rank):
        assert peak_bytes <= planned_bytes
