"""Partial sums of squares have one order on every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from protrain_kernels import TILE, sum_of_squares_reference
from protrain_kernels.host_kernels import sum_of_squares

COUNTS = [1, 127, 1024, 1025, TILE - 1, TILE, TILE + 1, 2 * TILE + 5000]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _values(count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    spread = torch.randn(count, generator=generator)
    return (spread * torch.rand(count, generator=generator).exp2() * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_same_bits_as_the_reference(
    backend: Any, same_bits: Callable[..., None], count: int, dtype: torch.dtype
) -> None:
    values = _values(count, dtype)
    same_bits(backend.sum_of_squares(values.to(backend.device)), sum_of_squares_reference(values))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch, compiled: None, same_bits: Callable[..., None], threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    values = _values(5 * TILE + 77, torch.bfloat16)
    same_bits(sum_of_squares(values), sum_of_squares_reference(values))


def test_the_reference_follows_the_stated_order() -> None:
    values = _values(TILE + 1500, torch.float32)
    whole = numpy.zeros(2 * TILE, dtype=numpy.float32)
    whole[: values.numel()] = values.numpy()
    expected = []
    for tile in whole.reshape(2, 16, 1024):
        lanes = [numpy.float32(0)] * 1024
        for row in tile:
            lanes = [numpy.float32(lane + numpy.float32(x * x)) for lane, x in zip(lanes, row, strict=True)]
        width = 512
        while width:
            lanes = [numpy.float32(lanes[i] + lanes[i + width]) for i in range(width)]
            width //= 2
        expected.append(lanes[0])
    assert sum_of_squares_reference(values).tolist() == [float(partial) for partial in expected]


def test_subnormal_squares_survive(backend: Any) -> None:
    values = torch.full((TILE,), 3e-21)  # squares to 9e-42, below the smallest normal fp32
    assert backend.sum_of_squares(values.to(backend.device)).item() > 0
