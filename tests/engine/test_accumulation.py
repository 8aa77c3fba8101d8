"""wrap(accumulation=n): the sums of n batches' gradients are planned for, and the bits are those of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import PlanError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    CKPT,
    FEW_PLANS,
    NONE,
    Loop,
    Spec,
    adamw,
    assert_same,
    plain_run,
    states,
    wrap_under,
)

SPECS = (
    *FEW_PLANS,
    Spec("all", "least", (CKPT,)),
    Spec("some", "least", (NONE, CKPT), small=True),
    Spec("none", "least", (CKPT, NONE), speculate=True, stream=True, sums=True),
    Spec("some", "least", (CKPT,), small=True, sums=True),
)
Batch = dict[str, Tensor]
Within = Callable[..., tuple[nn.Module, ProTrainOptimizer]]
SETTINGS: dict[str, tuple[torch.dtype, Loop, bool]] = {  # dtype, loop, whether updates run inside backward
    "fp32-clip": (torch.float32, Loop(max_norm=0.5, accumulate=2), False),
    "bf16-clip-no-sync": (torch.bfloat16, Loop(max_norm=0.5, accumulate=3, no_sync=True), False),
    "bf16": (torch.bfloat16, Loop(accumulate=2), False),
    "bf16-inside": (torch.bfloat16, Loop(accumulate=3, no_sync=True), True),
    "fp32-inside": (torch.float32, Loop(accumulate=2, no_sync=True), True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_plain_loops_bits_within_what_was_planned(
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., Batch],
    device: torch.device,
    name: str,
) -> None:
    """With no byte to spare, on the device or in host memory; a step of fewer batches is one too.

    Four settings in a row meet all plans.
    """
    dtype, loop, inside = SETTINGS[name]
    n_batches = 2 * loop.accumulate
    batches = [tiny_batch(seed) for seed in range(n_batches + 1)]
    expected, final = plain_run(lambda: tiny_model("gpt2"), batches, loop=loop, device=device, dtype=dtype)
    for spec in SPECS[list(SETTINGS).index(name) % 4 :: 4]:
        model = tiny_model("gpt2")
        wrapped, optimizer = wrap_under(
            spec,
            model,
            adamw(model),
            batches[0],
            device=device,
            dtype=dtype,
            tight=True,
            step_during_backward=inside,
            accumulation=loop.accumulate,
        )
        assert loop.run(wrapped, optimizer, batches) == expected, str(spec)
        assert_same(states(wrapped, optimizer), final)
        plan, report = optimizer.plan, optimizer.report()
        assert plan.accumulation == loop.accumulate
        assert report.host_bytes <= plan.host_bytes, str(spec)
        assert report.device_bytes <= plan.device_bytes, str(spec)


@pytest.fixture
def within(tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch]) -> Within:
    """A tiny model on the CPU with so much host memory, of which a plan for single batches leaves nothing."""
    model = tiny_model("gpt2")
    spec, cpu = Spec("none", "least", (CKPT,)), torch.device("cpu")
    plan = wrap_under(spec, model, adamw(model), tiny_batch(), device=cpu, dtype=torch.bfloat16)[1].plan

    def wrap(more_bytes: int, **options: Any) -> tuple[nn.Module, ProTrainOptimizer]:
        model = tiny_model("gpt2")
        return protrain.wrap(
            model,
            adamw(model),
            example_batch=tiny_batch(),
            device="cpu",
            dtype=torch.bfloat16,
            plan=plan,
            host_memory=plan.host_bytes + more_bytes,
            device_memory=plan.device_bytes + more_bytes,
            progress=False,
            **options,
        )

    return wrap


def test_a_plan_for_single_batches_is_carried_out_where_it_fits_and_named_where_not(within: Within) -> None:
    with pytest.raises(PlanError, match=r"made for accumulation=1, and here it is 4: make a new plan\. To fit:"):
        within(0, accumulation=4)
    plan = within(0)[1].plan
    n_elements = plan.n_chunks * plan.chunk_elements  # at least as many as there are
    _, optimizer = within(4 * n_elements, accumulation=4)
    assert optimizer.plan.accumulation == 4
    assert optimizer.plan.host_bytes <= plan.host_bytes + 4 * n_elements
