"""The trace on a GPU: models larger than its memory, garbage that others have left, and pinned memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.profiler.test_trace import _batch, _Block, _Model, profile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_on_a_gpu_a_model_larger_than_the_room_is_traced() -> None:
    width, rows = 1024, 512
    model = nn.Sequential(*[_Block(width) for _ in range(12)])
    batch = (torch.randn(rows, width),)
    profile(model, batch, device="cuda")  # the matmul library allocates workspaces and keeps them
    gc.collect()  # what earlier tests have left
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    weights = 2 * sum(p.numel() for p in model.parameters())
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + weights // 2) / total)
    try:
        traced = profile(model, batch, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() <= before
    assert traced.blocks[0].saved_bytes == rows * 4 * width * 2
    assert all(block.forward_ms > 0 and block.backward_ms > 0 for block in traced.blocks)
    meta = profile(model, batch, device="meta", dtype=torch.bfloat16)
    assert meta.units == traced.units
    for ours, theirs in zip(traced.segments, meta.segments, strict=True):
        assert (ours.phase, ours.block) == (theirs.phase, theirs.block)
        assert ours.live_bytes == pytest.approx(theirs.live_bytes, rel=0.05, abs=65536)


class _Collecting(nn.Linear):
    """A layer in whose forward the garbage collector happens to run."""

    def forward(self, input: Tensor) -> Tensor:
        gc.collect()
        return super().forward(input)


def test_on_a_gpu_garbage_that_is_collected_meanwhile_is_not_counted() -> None:
    model, batch = nn.Sequential(_Collecting(256, 256), nn.Linear(256, 256)), (torch.randn(64, 256),)
    profile(model, batch, device="cuda")  # the matmul library allocates workspaces and keeps them
    clean = profile(model, batch, device="cuda")
    garbage: list[Any] = [torch.empty(1 << 26, device="cuda")]
    garbage.append(garbage)
    del garbage
    traced = profile(model, batch, device="cuda")
    assert [segment.live_bytes for segment in traced.segments] == [segment.live_bytes for segment in clean.segments]


def test_on_a_gpu_no_pinned_memory_is_left_that_nobody_uses() -> None:
    profile(_Model(), _batch(), device="cuda", dtype=torch.float32)  # the first one pins what later ones use again
    unused_bytes = 1 << 26
    torch.empty(unused_bytes, pin_memory=True)  # as the compiler pins copies while it tunes a kernel
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert before >= unused_bytes
    profile(_Model(), _batch(), device="cuda", dtype=torch.float32)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= before - unused_bytes
