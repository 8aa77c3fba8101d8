"""AdamW on host memory that leaves the states as they are and writes the new states beside them.

It serves speculative updates, whose result may not be wanted: whether gradients must be clipped is known only when all
of them are there. The new states then take the place of the old ones, or are dropped. The bits are those of ``adam``,
and so is the memory traffic, at 26 bytes a parameter with the split master, because stores go around the cache, which
would first read what they overwrite.

Where there is no memory for all new states, ``adam_weight`` makes only the new weight, at 16 bytes a parameter. With
moments in bf16 the two take 18 and 12 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protrain_kernels.adam import adam
from protrain_kernels.adam_types import MASTER_DTYPES, MOMENT_DTYPES, AdamScalars, AdamStates
from protrain_kernels.checks import check_aligned, check_apart, check_scalar, check_vector
from protrain_kernels.host_kernels import host_adam_out_of_place
from protrain_kernels.rounding import check_gradient_factor

_CPU = torch.device("cpu")


def adam_out_of_place(
    old: AdamStates,
    new: AdamStates,
    grad: Tensor,
    scalars: AdamScalars,
    *,
    gradient_factor: float = 1.0,
    scale: Tensor | None = None,
    threads: int = 0,
) -> None:
    """One AdamW step from ``old`` to ``new``, which must not overlap.

    Args:
        old: [n] each, on the CPU at multiples of 256 bytes; unchanged. n is a multiple of 128.
        new: [n] each, on the CPU, of the same types; written.
        grad: [n] of the weight's type, or a float32 sum, as ``adam`` takes it.
        scalars: the constants of this step.
        gradient_factor: multiplies a float32 sum before it is rounded to the weight's type.
        scale: one float32 that multiplies the rounded gradient.
        threads: the number of host threads; 0 means torch.get_num_threads().

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or two share memory.
    """
    _check(old, grad, gradient_factor, scale)
    for kind, tensor, like in zip(AdamStates._fields, new, old, strict=True):
        numel = 0 if like is None else like.numel()
        _check_state(f"new.{kind}", tensor, None if like is None else like.dtype, old.weight.dtype, numel)
    check_apart({**_named("old", old), **_named("new", new), "grad": grad})
    if host_adam_out_of_place(old, new, grad, scalars, gradient_factor=gradient_factor, scale=scale, threads=threads):
        return
    for source, target in zip(old, new, strict=True):
        if source is not None and target is not None:
            target.copy_(source)
    adam(*new, grad, scalars, gradient_factor=gradient_factor, scale=scale, threads=threads)


def adam_weight(
    old: AdamStates,
    new_weight: Tensor,
    grad: Tensor,
    scalars: AdamScalars,
    *,
    gradient_factor: float = 1.0,
    scale: Tensor | None = None,
    threads: int = 0,
) -> None:
    """Write the weight that one AdamW step would leave, and no other state.

    Args:
        old: as ``adam_out_of_place`` takes it; unchanged.
        new_weight: [n] of the type of ``old.weight``, on the CPU at a multiple of 256 bytes; written.
        grad: [n] of the weight's type, or a float32 sum, as ``adam`` takes it.
        scalars: the constants of this step.
        gradient_factor: multiplies a float32 sum before it is rounded to the weight's type.
        scale: one float32 that multiplies the rounded gradient.
        threads: the number of host threads; 0 means torch.get_num_threads().

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or two share memory.
    """
    _check(old, grad, gradient_factor, scale)
    _check_state("new_weight", new_weight, old.weight.dtype, old.weight.dtype, old.weight.numel())
    check_apart({**_named("old", old), "new_weight": new_weight, "grad": grad})
    new = new_weight, None, None, None
    if host_adam_out_of_place(old, new, grad, scalars, gradient_factor=gradient_factor, scale=scale, threads=threads):
        return
    new_weight.copy_(old.weight)
    master = None if old.master is None else old.master.clone()
    adam(
        *(new_weight, master, old.exp_avg.clone(), old.exp_avg_sq.clone(), grad, scalars),
        gradient_factor=gradient_factor,
        scale=scale,
        threads=threads,
    )


def _check(old: AdamStates, grad: Tensor, gradient_factor: float, scale: Tensor | None) -> None:
    dtype, count = old.weight.dtype, old.weight.numel()
    if dtype not in MASTER_DTYPES:
        raise ValueError(f"old.weight must be bfloat16, float16 or float32, not {dtype}")
    check_vector("grad", grad, dtypes={dtype: None, torch.float32: None}, device=_CPU, numel=count)
    check_gradient_factor(gradient_factor, grad)
    check_scalar("scale", scale, dtype=torch.float32, device=_CPU)
    moment = old.exp_avg.dtype
    if moment not in MOMENT_DTYPES:
        raise ValueError(f"old.exp_avg must be float32 or bfloat16, not {moment}")
    wanted = (dtype, MASTER_DTYPES[dtype], moment, moment)
    for kind, tensor, expected in zip(AdamStates._fields, old, wanted, strict=True):
        _check_state(f"old.{kind}", tensor, expected, dtype, count)


def _named(which: str, states: AdamStates) -> dict[str, Tensor]:
    return {
        f"{which}.{kind}": tensor for kind, tensor in zip(states._fields, states, strict=True) if tensor is not None
    }


def _check_state(
    name: str, tensor: Tensor | None, dtype: torch.dtype | None, weight_dtype: torch.dtype, count: int
) -> None:
    if (tensor is None) != (dtype is None):
        raise ValueError(f"{name} must be {'None' if dtype is None else dtype} for {weight_dtype}")
    if tensor is not None and dtype is not None:
        check_vector(name, tensor, dtypes=(dtype,), device=_CPU, numel=count)
        check_aligned(name, tensor)
