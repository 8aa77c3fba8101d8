"""A training with speculative updates beside the plain loop, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    Batch,
    Loop,
    Spec,
    adamw,
    assert_same,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain

STEPS = 6
Run = Callable[[nn.Module, Any, list[Batch]], Any]


def trained(
    run: Run, device: torch.device, spec: Spec, *, dtype: torch.dtype = torch.bfloat16, accumulation: int = 1
) -> tuple[ProTrainOptimizer, int]:
    """What ``run`` trained, whose bits are those of the plain loop; and the number of chunks in host memory."""
    data = residual.batches(STEPS)
    model, again = residual.make(), residual.make()
    plain, trainer = prepare_plain(model, adamw(model), device=device, dtype=dtype)
    options: dict[str, Any] = {"dtype": dtype, "accumulation": accumulation}
    wrapped, optimizer = wrap_under(spec, again, adamw(again), data[0], device=device, **options)
    torch.manual_seed(1)
    expected = run(plain, trainer, data)
    torch.manual_seed(1)
    assert run(wrapped, optimizer, data) == expected
    assert_same(states(wrapped, optimizer), states(plain, trainer))
    plan = optimizer.plan
    assert plan.n_speculate == plan.n_chunks - plan.n_persist > 0
    n_whole = plan.n_speculate - plan.n_weight_only
    assert (plan.n_weight_only > 0) == spec.weights
    assert not spec.weights or n_whole == (plan.n_speculate // 2 if spec.whole else 0)
    assert not spec.whole or 0 < n_whole < plan.n_speculate
    return optimizer, plan.n_speculate


def counts(optimizer: ProTrainOptimizer) -> tuple[int, int]:
    report = optimizer.report()
    return report.speculative_updates, report.redone_updates


def clipping(max_norm: float | None, **options: Any) -> Run:
    return lambda model, optimizer, data: Loop(max_norm=max_norm, **options).run(model, optimizer, data)
