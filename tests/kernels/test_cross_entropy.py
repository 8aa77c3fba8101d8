"""The cross-entropy kernel computes what its reference computes, and touches nothing but the rows that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from protrain_kernels.cross_entropy import cross_entropy_reference, launch_cross_entropy

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {"ignore_index": -100, "softcap": 0.0, "writes": True}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# A gradient may differ by one step between two numbers of its type, and near 0 by the smallest number of the type.
TOLERANCES = {torch.bfloat16: (2**-7, 1e-9), torch.float16: (2**-9, 2**-24), torch.float32: (1e-4, 1e-9)}
WORDS = [5, 1001, 8192, 8193, 17003]  # the kernel takes 8,192 at a time, eight of them beside each other
BEYOND = 7.0  # what memory behind a row holds


def _rows(words: int, dtype: torch.dtype, *, rows: int = 4) -> tuple[Tensor, Tensor]:
    """(logits, which are the first words of longer rows; targets, the first and the last word among them)."""
    generator = torch.Generator().manual_seed(words)
    logits = torch.full((rows, words + 64), BEYOND, dtype=dtype)[:, :words]
    logits.copy_(3 * torch.randn(rows, words, generator=generator))
    targets = torch.randint(words, (rows,), generator=generator)
    targets[:2] = torch.tensor([0, words - 1])
    return logits, targets


def _run(
    compute: Callable[..., None], logits: Tensor, targets: Tensor, device: torch.device, **options: Any
) -> tuple[Tensor, Tensor]:
    """(logits afterwards, losses), computed on ``device`` from a copy."""
    assert logits._base is not None
    storage, words = logits._base.to(device, copy=True), logits.shape[1]
    losses = torch.full((len(logits),), 123.0, device=device)
    compute(storage[:, :words], targets.to(device), losses, torch.tensor(3.0, device=device), **PLAIN | options)
    assert (storage[:, words:] == BEYOND).all()
    return storage[:, :words].cpu(), losses.cpu()


def _compare(device: torch.device, logits: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(the kernel's gradient of the logits, its losses), which are those of the reference."""
    found, losses = _run(launch_cross_entropy, logits, targets, device, **options)
    wanted, wanted_losses = _run(cross_entropy_reference, logits, targets, CPU, **options)
    rtol, atol = TOLERANCES[logits.dtype]
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)
    return found, losses


@DTYPES
@pytest.mark.parametrize("words", WORDS)
def test_as_the_reference(triton_device: torch.device, words: int, dtype: torch.dtype) -> None:
    logits, targets = _rows(words, dtype)
    found, losses = _compare(triton_device, logits, targets)
    assert found.isfinite().all()
    assert (losses > 0).all()
    _, capped = _compare(triton_device, logits, targets, softcap=5.0)
    assert ((losses - capped).abs() > 1e-3).all()  # else the cap would do nothing


@DTYPES
@pytest.mark.parametrize("softcap", [0.0, 9.0])
def test_without_a_gradient_the_logits_stay(triton_device: torch.device, softcap: float, dtype: torch.dtype) -> None:
    logits, targets = _rows(8195, dtype)
    targets[2:] = torch.tensor([-100, 9000])
    found, losses = _run(launch_cross_entropy, logits, targets, triton_device, writes=False, softcap=softcap)
    _, with_gradient = _run(launch_cross_entropy, logits, targets, triton_device, softcap=softcap)
    assert torch.equal(found, logits)
    torch.testing.assert_close(losses, with_gradient, rtol=1e-6, atol=0, equal_nan=True)


@DTYPES
def test_ignored_rows_and_targets_that_are_no_word(triton_device: torch.device, dtype: torch.dtype) -> None:
    """An ignored row may hold anything."""
    logits, targets = _rows(1001, dtype, rows=8)
    targets[1:6], targets[6:] = torch.tensor([-100, 1001, -1, 1 << 40, 1000]), -100
    logits[6], logits[7] = torch.nan, torch.inf
    found, losses = _compare(triton_device, logits, targets)
    assert losses.isnan().tolist() == [False, False, True, True, True, False, False, False]
    assert losses[[1, 6, 7]].tolist() == [0, 0, 0]
    assert (found[[1, 6, 7]] == 0).all()
    assert found[2:5].isnan().all()
    assert found[[0, 5]].isfinite().all()


@pytest.mark.parametrize("ignored", [0, 1, 3, 16])
def test_a_word_can_be_ignored(triton_device: torch.device, ignored: int) -> None:
    """Triton makes code of its own for the number 1 and for multiples of 16."""
    logits, targets = _rows(1001, torch.bfloat16)
    targets[:] = torch.tensor([ignored, -100, 5, ignored])
    found, losses = _compare(triton_device, logits, targets, ignore_index=ignored)
    assert losses[[0, 3]].tolist() == [0, 0]
    assert (found[[0, 3]] == 0).all()
    assert losses[1].isnan()
    assert losses[2] > 0


def test_impossible_words_and_large_logits(triton_device: torch.device) -> None:
    """A word of minus infinity has the probability 0. Logits whose exponentials overflow are as good as any."""
    logits, targets = _rows(8197, torch.float32)
    logits[0, 1:8194] = -torch.inf  # all that some of the lanes see, and all of the first turn but one
    logits[1] += 30_000
    logits[2] -= 30_000
    targets[0] = 0
    found, losses = _compare(triton_device, logits, targets)
    assert (found[0, 1:8194] == 0).all()
    assert losses.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_shows_in_its_row_alone(triton_device: torch.device, bad: float) -> None:
    logits, targets = _rows(8197, torch.bfloat16)
    logits[2, 8100] = bad
    _, losses = _run(launch_cross_entropy, logits, targets, triton_device)
    assert losses.isfinite().tolist() == [True, True, False, True]
