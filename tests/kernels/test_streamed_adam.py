"""Streaming states through another memory, in pieces, changes no bit of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protrain_kernels import AdamStaging, adam_reference, adam_scalars, streamed_adam
from tests.kernels.states import random_states

COUNT = 11 * 1024 + 384
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MOMENTS = pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16], ids=["moments", "bfloat16-moments"])
SCALARS = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, decoupled=True)
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def _state(
    dtype: torch.dtype, grad_dtype: torch.dtype, count: int = COUNT, moment_dtype: torch.dtype = torch.float32
) -> Tensors:
    states = random_states(count, dtype, moment_dtype)._asdict()
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(grad_dtype)
    return {name: state for name, state in states.items() if state is not None} | {"grad": gradient}


def _step(tensors: Tensors, **options: Any) -> Any:
    named: Any = {"master": None, **tensors}
    return streamed_adam(**named, scalars=SCALARS, **options)


def _expected(tensors: Tensors, scale: torch.Tensor | None = None) -> Tensors:
    copies = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    named: Any = {"master": None, **copies}
    adam_reference(**named, scalars=SCALARS, scale=None if scale is None else scale.cpu())
    return copies


def _check(found: Tensors, expected: Tensors, same_bits: Callable[..., None]) -> None:
    for name, tensor in found.items():
        same_bits(tensor, expected[name])


@pytest.mark.parametrize("piece", [128, 1280, 1 << 14])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@MOMENTS
def test_pieces_on_the_cpu(
    same_bits: Callable[..., None], moment_dtype: torch.dtype, dtype: torch.dtype, piece: int
) -> None:
    """With the copies, the slots in turn and the pieces' ends; the CPU stands in for the device."""
    tensors = _state(dtype, torch.float32, moment_dtype=moment_dtype)
    expected = _expected(tensors)
    staging = AdamStaging(CPU, size_bytes=2 * piece * 18)
    staging.memory.fill_(0xFF)  # NaN
    assert _step(tensors, staging=staging) is None
    _check(tensors, expected, same_bits)


def test_nothing_to_update() -> None:
    empty = {name: tensor[:0] for name, tensor in _state(torch.bfloat16, torch.bfloat16).items()}
    _step(empty, staging=AdamStaging(CPU, size_bytes=1 << 16))


def test_bad_arguments_are_named() -> None:
    tensors = _state(torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match="size_bytes is 4000: it must be at least 4608"):
        AdamStaging(CPU, size_bytes=4000)
    staging = AdamStaging(CPU, size_bytes=1 << 16)
    with pytest.raises(ValueError, match="exp_avg has 128 elements"):
        _step(tensors | {"exp_avg": torch.zeros(128)}, staging=staging)
    with pytest.raises(ValueError, match="scale must be one float32"):
        _step(tensors, scale=torch.zeros(2), staging=staging)
    with pytest.raises(ValueError, match="weight must be in pinned host memory for cpu"):
        _step(tensors | {"weight": tensors["weight"].to("meta")}, staging=staging)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestOnTheGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @MOMENTS
    def test_same_bits(self, same_bits: Callable[..., None], moment_dtype: torch.dtype, dtype: torch.dtype) -> None:
        count = 1 << 20
        start = _state(dtype, torch.float32, count, moment_dtype)
        tensors = {name: tensor.clone().pin_memory() for name, tensor in start.items()}
        scale = torch.tensor([0.3], device="cuda")
        expected = _expected(start, scale)
        staging = AdamStaging(torch.device("cuda", 0), size_bytes=1 << 21)
        done = _step(tensors, scale=scale, staging=staging)
        assert done is not None
        done.synchronize()
        _check(tensors, expected, same_bits)

    def test_many_chunks_through_one_staging_area(self, same_bits: Callable[..., None]) -> None:
        staging = AdamStaging(torch.device("cuda", 0), size_bytes=1 << 20)
        start = _state(torch.bfloat16, torch.bfloat16, 1 << 18)
        chunks = [{name: tensor.clone().pin_memory() for name, tensor in start.items()} for _ in range(6)]
        events = [_step(chunk, staging=staging) for chunk in chunks]
        expected = _expected(start)
        for chunk, event in zip(chunks, events, strict=True):
            assert event is not None
            event.synchronize()
            _check(chunk, expected, same_bits)

    def test_a_gradient_that_is_still_on_its_way_is_waited_for(self, same_bits: Callable[..., None]) -> None:
        start = _state(torch.bfloat16, torch.float32, 1 << 18)
        tensors = {name: tensor.clone().pin_memory() for name, tensor in start.items()}
        tensors["grad"].fill_(torch.nan)
        values = start["grad"].cuda()
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        tensors["grad"].copy_(values, non_blocking=True)
        done = _step(tensors, staging=AdamStaging(torch.device("cuda", 0), size_bytes=1 << 20))
        assert done is not None
        done.synchronize()
        _check(tensors, _expected(start), same_bits)

    def test_pageable_memory_is_refused(self) -> None:
        with pytest.raises(ValueError, match="weight must be in pinned host memory"):
            _step(_state(torch.bfloat16, torch.bfloat16), staging=AdamStaging(torch.device("cuda", 0)))
