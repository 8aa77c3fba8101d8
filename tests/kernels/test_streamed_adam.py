"""Streaming states through another memory, in pieces, changes no bit of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain_kernels import AdamStaging, AdamStates, adam_reference, streamed_adam
from tests.kernels.states import MOMENTS, SCALARS, TYPES, check, copied, random_states

DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def _gradient(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)


def _expected(states: AdamStates, grad: torch.Tensor, **options: Any) -> AdamStates:
    found = copied(states)
    adam_reference(*found, grad, SCALARS, **options)
    return found


@pytest.mark.parametrize("piece", [128, 1280, 1 << 14])
@DTYPES
@MOMENTS
def test_pieces_on_the_cpu(moment_dtype: torch.dtype, dtype: torch.dtype, piece: int) -> None:
    """With the copies, the slots in turn and the pieces' ends; the CPU stands in for the device."""
    count = 11 * 1024 + 384
    states, grad = random_states(count, dtype, moment_dtype), _gradient(count)
    expected = _expected(states, grad, gradient_factor=1 / 3)
    staging = AdamStaging(CPU, size_bytes=2 * piece * 18)
    staging.memory.fill_(0xFF)  # NaN
    streamed_adam(*states, grad, SCALARS, staging, gradient_factor=1 / 3).synchronize()
    check(states, expected)
    streamed_adam(*states.part(slice(0, 0)), grad[:0], SCALARS, staging)
    check(states, expected)


def _pinned(states: AdamStates) -> AdamStates:
    pinned: Any = [None if state is None else state.clone().pin_memory() for state in states]
    return AdamStates(*pinned)


@pytest.mark.gpu
class TestOnTheGpu:
    @DTYPES
    @MOMENTS
    def test_same_bits(self, moment_dtype: torch.dtype, dtype: torch.dtype) -> None:
        count, scale = 1 << 20, torch.tensor([0.3])
        start, grad = random_states(count, dtype, moment_dtype), _gradient(count)
        states, staging = _pinned(start), AdamStaging(GPU, size_bytes=1 << 21)
        done = streamed_adam(*states, grad.pin_memory(), SCALARS, staging, scale=scale.cuda())
        done.synchronize()
        check(states, _expected(start, grad, scale=scale))

    def test_many_chunks_through_one_staging_area(self) -> None:
        count, staging = 1 << 18, AdamStaging(GPU, size_bytes=1 << 20)
        start, grad = random_states(count, torch.bfloat16), _gradient(count, torch.bfloat16).pin_memory()
        chunks = [_pinned(start) for _ in range(6)]
        events = [streamed_adam(*chunk, grad, SCALARS, staging) for chunk in chunks]
        expected = _expected(start, grad)
        for chunk, event in zip(chunks, events, strict=True):
            event.synchronize()
            check(chunk, expected)

    def test_a_gradient_that_is_still_on_its_way_is_waited_for(self) -> None:
        count = 1 << 18
        start, values = random_states(count, torch.bfloat16), _gradient(count)
        states, grad = _pinned(start), torch.full((count,), torch.nan).pin_memory()
        on_device = values.cuda()
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        grad.copy_(on_device, non_blocking=True)
        done = streamed_adam(*states, grad, SCALARS, AdamStaging(GPU, size_bytes=1 << 20))
        done.synchronize()
        check(states, _expected(start, values))

    def test_pageable_memory_is_refused(self) -> None:
        with pytest.raises(ValueError, match="weight must be in pinned host memory"):
            streamed_adam(*random_states(256, torch.bfloat16), _gradient(256), SCALARS, AdamStaging(GPU))
