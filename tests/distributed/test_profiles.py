"""Ranks that profile a model run equally many steps, because its forward may have collectives of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import protrain
from protrain import wrapping
from protrain.profiler import cache, step_times, trace
from tests.distributed.pool import on_ranks


class Centred(nn.Module):
    """It takes the mean of its outputs, over all ranks, from them."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        mean = x.detach().mean()
        if self.together:
            dist.all_reduce(mean)
        return (x - mean / 2).square().mean()


def wrap(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return protrain.wrap(
        model, optimizer, example_batch=(torch.ones(2, 8),), device="cpu", device_memory="1GiB", progress=False
    )


def profile_with_a_slow_rank(rank: int) -> int:
    """The steps of the profile seem long on rank 1 and short on rank 0. Returns how often forward was called."""
    durations = step_times.durations
    slow = 1e6 if rank else 1.0

    def seeming(segments: Any) -> Any:
        return [(whole * slow, recomputed) for whole, recomputed in durations(segments)]

    def timed(*args: Any, **options: Any) -> Any:
        return step_times.time_steps(*args, **{**options, "sustained_ms": 60000.0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping, "cached_profile", cache.cached_profile)
        patch.setattr(step_times, "durations", seeming)
        patch.setattr(trace, "time_steps", timed)
        model, calls = Centred(together=True), []
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        wrap(model)
    n_calls = len(calls)
    model(torch.ones(2, 8)).backward()
    return n_calls


def test_a_slow_rank_decides_how_many_steps_all_time() -> None:
    assert on_ranks(2, profile_with_a_slow_rank) == [3, 3], "one measures memory, and of two more the second counts"


def profile_with_a_full_rank(rank: int) -> tuple[str, float]:
    """Rank 1 has no memory for a profile of a run, and counts it. Returns the plan, and the loss of a step."""
    n_profiles = 0

    def profile(*args: Any, **options: Any) -> Any:
        nonlocal n_profiles
        n_profiles += 1
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return trace.profile(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping, "cached_profile", cache.cached_profile)
        patch.setattr(cache, "profile", profile)
        torch.manual_seed(0)
        model, optimizer = wrap(Centred(together=False))
    assert n_profiles == 1
    loss = model(torch.ones(2, 8))
    loss.backward()
    optimizer.step()
    return str(optimizer.plan), loss.item()


def test_a_rank_without_memory_for_a_profile_leaves_the_others_theirs() -> None:
    first, other = on_ranks(2, profile_with_a_full_rank)
    assert first == other
