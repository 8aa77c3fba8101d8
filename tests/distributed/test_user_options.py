"""Options of wrap on two ranks give the bits that they have on one process with the micro-batches of both."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import protrain
from tests.distributed.pool import on_ranks
from tests.distributed.test_bits import batches, make
from tests.engine.harness import adamw, assert_same, default_loss, states

STEPS = 2


def train(rank: int, size: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Steps of two micro-batches, on one process or one on each of two ranks."""
    model = make("llama")
    data = [{name: rows[:1] for name, rows in batch.items()} for batch in batches(2 * STEPS)]  # interpreters are slow
    wrapped, optimizer = protrain.wrap(
        model,
        adamw(model),
        example_batch=data[0],
        device="cpu",
        device_memory="1GiB",
        accumulation=2 // size,
        gradient_reduction="sum",
        progress=False,
        **options,
    )
    losses = []
    for step in range(STEPS):
        for batch in data[2 * step : 2 * step + 2][rank::size]:
            loss = default_loss(wrapped, batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, states(wrapped, optimizer)


@pytest.mark.slow
def test_chunked_loss() -> None:
    losses, final = train(0, 1, {"chunked_loss": True})
    for rank, (own, same) in enumerate(on_ranks(2, train, 2, {"chunked_loss": True}, timeout_s=120)):
        assert own == losses[rank::2]
        assert_same(same, final, where=f"rank {rank}")
