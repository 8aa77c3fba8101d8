"""Two ranks add up the gradients of more backward() calls than the plan has memory for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

import protrain
from tests.distributed.pool import on_ranks
from tests.engine.harness import adamw, default_loss
from tests.engine.residual import batches, make


def add_up(rank: int, under_no_sync: bool) -> str:
    """The error of a backward() under no_sync(), or of a second one without a step between."""
    data = batches(4)[rank::2]
    model = make()
    wrapped: Any
    wrapped, optimizer = protrain.wrap(
        model, adamw(model), example_batch=data[0], device="cpu", device_memory="1GiB", progress=False
    )
    with wrapped.no_sync() if under_no_sync else nullcontext():
        loss = default_loss(wrapped, data[0])
        try:
            loss.backward()
            default_loss(wrapped, data[1]).backward()
        except protrain.MisuseError as error:
            optimizer.zero_grad()
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("under_no_sync", "begins"), [(True, "a backward() under model.no_sync() in a step"), (False, "another backward()")]
)
def test_the_error_names_the_remedy(under_no_sync: bool, begins: str) -> None:
    for error in on_ranks(2, add_up, under_no_sync):
        assert error.startswith(begins)
        assert "pass accumulation=2 or more to protrain.wrap" in error
        assert "as LocalSGD lets it, because each has a part of one model" in error
