"""Ranks that do not run the same units: text beside images, frozen parts, evaluation, more calls than profiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.pool import on_ranks
from tests.distributed.test_bits import check
from tests.distributed.training import Training
from tests.engine.harness import CKPT, NONE, SWAP, Spec, adamw, default_loss, seeded, wrap_under

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
