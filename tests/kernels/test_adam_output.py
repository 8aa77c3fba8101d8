"""AdamW into a second copy: the bits of AdamW in place, and the old states as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from protrain_kernels import AdamStates, adam, adam_scalars
from tests.kernels.states import check, random_states

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def states(count: int, dtype: torch.dtype, *, start: int = 0, moment_dtype: torch.dtype = torch.float32) -> AdamStates:
    """Random ones that begin ``start`` elements into their storage."""
    weight, master, exp_avg, exp_avg_sq = random_states(start + count, dtype, moment_dtype)
    return AdamStates(weight[start:], None if master is None else master[start:], exp_avg[start:], exp_avg_sq[start:])


def copy(of: AdamStates, *, fill: float | None = None, start: int = 0) -> AdamStates:
    """Memory of its own with the values of ``of``, or filled with a number."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(start + tensor.numel(), dtype=tensor.dtype)[start:]
        return memory.copy_(tensor) if fill is None else memory.fill_(fill)

    master = None if of.master is None else own(of.master)
    return AdamStates(own(of.weight), master, own(of.exp_avg), own(of.exp_avg_sq))


@pytest.mark.parametrize("how", ["c", "aten"])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.bfloat16], ids=["moments", "bfloat16-moments"])
@pytest.mark.parametrize("l2", [False, True], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits(
    monkeypatch: pytest.MonkeyPatch,
    compiled: None,
    same_bits: Callable[..., None],
    dtype: torch.dtype,
    moment_dtype: torch.dtype,
    l2: bool,
    how: str,
) -> None:
    monkeypatch.setenv("PROTRAIN_HOST_KERNELS", how)
    scalars = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, decoupled=not l2)
    scale = torch.tensor([0.37])
    # Less than a block, one, one and a part, several runs of them.
    for count, start in ((128, 0), (512, 128), (640, 0), (128 * 781, 128)):
        old = states(count, dtype, start=start, moment_dtype=moment_dtype)
        grad = torch.randn(count).to(torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)
        expected, before, new = copy(old), copy(old), copy(old, fill=77, start=start)
        adam(*expected, grad, scalars, scale=scale, threads=2)
        adam(*old, grad, scalars, scale=scale, threads=2, out=new)
        check(new, expected, same_bits)
        check(old, before, same_bits)


def test_bad_arguments_are_named() -> None:
    old = states(256, torch.bfloat16)
    scalars = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)
    grad = torch.zeros(256, dtype=torch.bfloat16)
    new = copy(old)
    for wrong, message in (
        (new._replace(exp_avg=old.exp_avg), r"out\.exp_avg overlaps exp_avg"),
        (new._replace(exp_avg=old.exp_avg_sq), r"exp_avg_sq overlaps out\.exp_avg"),
        (new._replace(exp_avg_sq=new.exp_avg), r"out\.exp_avg_sq overlaps out\.exp_avg"),
        (new._replace(weight=grad), r"out\.weight overlaps grad"),
        (new._replace(weight=old.weight), r"out\.weight overlaps weight"),
        (new._replace(master=None), r"out\.master must be torch\.int16, not None"),
        (new._replace(weight=new.weight.half()), r"out\.weight must be torch\.bfloat16"),
        (new._replace(exp_avg_sq=new.exp_avg_sq.bfloat16()), r"out\.exp_avg_sq must be torch\.float32"),
        (copy(states(128, torch.bfloat16)), r"out\.weight has 128 elements and needs 256"),
    ):
        with pytest.raises(ValueError, match=message):
            adam(*old, grad, scalars, out=wrong)
