"""More than the plan has room for: one clear error that names the thing and the remedy, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import BudgetError, MisuseError
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    FEW_PLANS,
    NONE,
    SWAP,
    Spec,
    adamw,
    assert_same,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.unharmed import CPU, Batch, Wrap, Wrapped, assert_unharmed, train, wrapper


@pytest.fixture
def wrapped(tiny_model: Callable[..., nn.Module], batch: Batch) -> Wrap:
    return wrapper(tiny_model, batch)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_without_memory_for_it_a_larger_batch_is_refused_and_a_smaller_one_trains(
    wrapped: Wrap, batch: Batch, tiny_batch: Callable[..., Batch]
) -> None:
    model, optimizer = wrapped(Spec("none", "least", (CKPT,)), tight=True)
    for larger in (tiny_batch(batch=3), tiny_batch(sequence=17), tiny_batch(batch=1, sequence=32)):
        shape = tuple(larger["input_ids"].shape)
        words = r"^input_ids has .*larger than the \(2, 16\) that .* 0 B are free; .*as long in every dimension"
        for args, kwargs in (((), larger), ((larger["input_ids"],), {"labels": larger["labels"]})):
            with pytest.raises(MisuseError, match=words) as caught:
                model(*args, **kwargs)
            assert str(shape) in str(caught.value)
    first, second = train(model, optimizer, tiny_batch(batch=1, sequence=9), steps=2)
    assert second < first
    first, second = train(model, optimizer, tiny_batch(batch=4, sequence=8), steps=2)
    assert second < first
    with torch.no_grad():  # keeps nothing for a backward, so the plan says nothing about it
        assert model(**tiny_batch(batch=3)).logits.shape[0] == 3


# -- budgets while running ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [(NONE,), (CKPT,)], ids=["none", "ckpt"])
def test_more_forwards_than_the_device_has_room_for(
    wrapped: Wrap, tiny_model: Callable[..., nn.Module], batch: Batch, modes: Any
) -> None:
    spec = Spec("none", "least", modes)
    model, optimizer = wrapped(spec, tight=True)
    losses: list[Tensor] = []
    with pytest.raises(BudgetError, match=r"simulated device is full.*call backward\(\) before the next forward"):
        losses.extend(model(**batch).loss for _ in range(20))
    losses.clear()
    assert_unharmed((model, optimizer), tiny_model, batch)


def sequential(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth))
    )


def roomy_and_tight(width: int, depth: int, spec: Spec, inputs: tuple[Tensor], dtype: torch.dtype) -> list[Wrapped]:
    """The same model twice under the same plan: with any host memory, and with no more than the plan takes."""
    model = sequential(width, depth)
    roomy = wrap_under(spec, model, adamw(model), inputs, device=CPU, dtype=dtype)
    plan = roomy[1].plan
    model = sequential(width, depth)
    tight = protrain.wrap(
        model,
        adamw(model),
        example_batch=inputs,
        device="cpu",
        dtype=dtype,
        plan=plan,
        device_memory="1GiB",
        host_memory=plan.host_bytes,
        progress=False,
    )
    return [roomy, tight]


def test_more_forwards_than_the_host_has_room_to_swap() -> None:
    inputs = (torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)),)
    roomy, tight = roomy_and_tight(64, 4, Spec("none", "least", (SWAP,)), inputs, torch.float32)
    kept: list[Tensor] = []
    with pytest.raises(BudgetError, match=r"no host memory to swap another .*call backward\(\) before the next"):
        kept.extend(tight[0](*inputs) for _ in range(20))
    kept.clear()
    for model, optimizer in (roomy, tight):
        for _ in range(2):
            model(*inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(states(*tight), states(*roomy))
    assert tight[1].report().host_bytes <= tight[1].plan.host_bytes


def test_no_sync_begins_a_sum_that_must_be_planned() -> None:
    model, data = residual.make(), residual.batches(1)
    wrapped, optimizer = wrap_under(FEW_PLANS[0], model, adamw(model), data[0], device=CPU)
    no_sync: Any = wrapped.no_sync
    with no_sync(), pytest.raises(MisuseError, match=r"under model.no_sync\(\) .*pass accumulation=2 or more"):
        default_loss(wrapped, data[0]).backward()
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
