"""Where several ranks start from: the values of the first rank, whatever each has built."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.distributed.pool import RankError, on_ranks
from tests.distributed.test_bits import config, make, transformers


def start(rank: int, build: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values that a rank builds, and those that it has after wrap."""
    model: nn.Module = build(rank)
    built = {} if next(model.parameters()).is_meta else {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    wrapped, _ = protrain.wrap(
        model,
        optimizer,
        example_batch={"input_ids": ids, "labels": ids},
        device="cpu",
        device_memory="1GiB",
        progress=False,
    )
    return built, {name: value.clone() for name, value in wrapped.state_dict().items()}


def seeded_by_rank(rank: int) -> nn.Module:
    """Half of the parameters differ between ranks, by a single bit at least."""
    model = make("gpt2")
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if index % 2:
                parameter.view(-1)[-1] += rank
    return model


def empty(rank: int, family: str = "llama") -> nn.Module:
    torch.manual_seed(5 + rank)
    with protrain.empty_parameters():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config(family))
    return model


@pytest.mark.slow
def test_the_values_of_the_first_rank() -> None:
    (first, mine), (other, theirs), _ = on_ranks(3, start, seeded_by_rank)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    for name, value in first.items():
        assert torch.equal(mine[name], value), name
        assert torch.equal(theirs[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_empty_parameters_are_made_as_on_one_rank_with_the_seed_of_the_first(family: str) -> None:
    (_, mine), (_, theirs) = on_ranks(2, start, partial(empty, family=family))
    _, alone = start(0, partial(empty, family=family))
    assert alone.keys() == mine.keys() == theirs.keys()
    for name, value in alone.items():
        assert torch.equal(mine[name], value), name
        assert torch.equal(theirs[name], value), name


class Fourier(nn.Module):
    """It has random features, a mask, and a table that is not saved, all of which it draws when it is made."""

    frequencies: Tensor
    mask: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(4, 3))
        self.register_buffer("mask", torch.rand(8) < 0.5)
        self.register_buffer("table", torch.randn(8), persistent=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.cat((torch.sin(x @ self.frequencies.T), torch.cos(x @ self.frequencies.T)), 1)
        output: Tensor = self.head(waves * self.mask + self.table)
        return output


def wrap_fourier(rank: int, late: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The buffers that a rank builds, and those that it has after wrap."""
    torch.manual_seed(rank)
    model, batch = Fourier(), (torch.ones(2, 3),)
    built = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, _ = protrain.wrap(
        model, optimizer, example_batch=None if late else batch, device="cpu", device_memory="1GiB", progress=False
    )
    if late:
        wrapped(*batch).sum().backward()
    return built, dict(wrapped.named_buffers())


@pytest.mark.parametrize("late", [False, True])
def test_buffers_of_the_first_rank(late: bool) -> None:
    (first, mine), (other, theirs) = on_ranks(2, wrap_fourier, late)
    assert all(not torch.equal(first[name], other[name]) for name in first)
    for name, value in first.items():
        assert torch.equal(mine[name], value), name
        assert torch.equal(theirs[name], value), name


def another_model(rank: int) -> nn.Module:
    return make("gpt2" if rank else "llama")


def test_different_models_are_refused_on_every_rank() -> None:
    with pytest.raises(RankError) as raised:
        on_ranks(2, start, another_model)
    assert all(error is not None and "rank 1 has another model than rank 0" in error for error in raised.value.by_rank)
