"""Moments in bf16: under every plan the bits of the plain loop that has them too, in the memory that was planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import protrain
from protrain.common.errors import PlanError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import FEW_PLANS, PLANS, Loop, Spec, adamw, check_equal_to_plain, wrap_under

STEPS = 4
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# Steps that are clipped and others, so that speculative updates are committed and done again.
CLIPPED = Loop(max_norm=0.05)


CASES: list[Any] = [
    # A few plans, swapped blocks beside speculative updates, and some of weights alone.
    ((*FEW_PLANS, PLANS[10], PLANS[18]), BFLOAT16, CLIPPED, {}),
    (FEW_PLANS[::2], FLOAT16, CLIPPED, {}),
    (FEW_PLANS[::2], BFLOAT16, Loop(), {"step_during_backward": True}),
    (FEW_PLANS[1::2], FLOAT32, CLIPPED, {}),
    (FEW_PLANS[1::2], BFLOAT16, Loop(max_norm=0.05, accumulate=2), {"accumulation": 2}),
]


@pytest.mark.parametrize(
    ("specs", "dtype", "loop", "options"), CASES, ids=("bf16", "fp16", "inside", "fp32", "accumulated")
)
def test_bits(
    specs: tuple[Spec, ...], dtype: torch.dtype, loop: Loop, options: dict[str, Any], device: torch.device
) -> None:
    data, how = residual.batches(STEPS * loop.accumulate), {"device": device, "dtype": dtype, **options}
    check_equal_to_plain(residual.make, data, run=loop.run, specs=specs, moment_dtype="bfloat16", **how)


@pytest.mark.parametrize(("dtype", "speculate"), [(BFLOAT16, False), (FLOAT16, True)], ids=str)
def test_memory_is_as_planned(dtype: torch.dtype, speculate: bool, device: torch.device) -> None:
    """Four bytes a parameter less, and as many of a second copy."""
    spec, batch = Spec("none", "least", "c", speculate=speculate), residual.batches(1)[0]
    elements = sum(parameter.numel() for parameter in residual.make(width=256).parameters())
    reports = {}
    for moment_dtype in ("float32", "bfloat16"):
        model = residual.make(width=256)
        _, optimizer = wrap_under(
            spec, model, adamw(model), batch, device=device, dtype=dtype, moment_dtype=moment_dtype
        )
        assert optimizer.plan.moment_dtype == moment_dtype
        reports[moment_dtype] = optimizer.report()
    before, after = reports["float32"], reports["bfloat16"]
    saved = (8 if speculate else 4) * elements
    assert saved <= before.predicted_host_bytes - after.predicted_host_bytes <= 1.02 * saved
    assert 0.99 * saved <= before.host_bytes - after.host_bytes <= 1.02 * saved


def test_a_plan_for_them_is_refused_without_them_and_no_plan_is_where_they_alone_fit() -> None:
    def wrap(host_memory: int | str, **options: Any) -> ProTrainOptimizer:
        model, limits = residual.make(width=256), {"device_memory": "3MiB", "host_memory": host_memory}
        options = {"example_batch": residual.batches(1)[0], "device": "cpu", "progress": False, **limits, **options}
        return protrain.wrap(model, adamw(model), **options)[1]

    with pytest.raises(PlanError, match="no plan fits the host") as raised:
        wrap("1MiB")
    less = raised.value.needed_bytes - 1
    with pytest.raises(PlanError, match="so does moment_dtype=bfloat16"):
        wrap(less)
    plan = wrap(less, moment_dtype="bfloat16").plan
    assert plan.moment_dtype == "bfloat16"
    assert "moments=bfloat16" in str(plan)
    with pytest.raises(PlanError, match="made for moment_dtype=bfloat16, and here it is float32: pass it here as well"):
        wrap(less, plan=plan)
    with pytest.raises(PlanError, match="the plan does not fit the host memory") as raised:
        wrap(plan.host_bytes - 1, plan=plan)
    assert "moment_dtype" not in str(raised.value), "nor would it fit with them"
    with pytest.raises(ValueError, match="moment_dtype must be float32 or bfloat16, not 'int8'"):
        dataclasses.replace(plan, moment_dtype="int8")
