"""AdamW on host memory that leaves the states as they are and writes the new ones beside them.

For a step that may not be wanted: whether gradients must be clipped is known only when all of them are. The new states
then take the place of the old ones, or are forgotten. The memory traffic is that of ``adam``, 26 bytes a parameter with
the split master: stores go around the cache, which would first read what they overwrite. So are the bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from protrain_kernels.adam import MASTER_DTYPES, AdamScalars, adam
from protrain_kernels.checks import FLOATS, check_aligned, check_scalar, check_vector
from protrain_kernels.host_adam import host_adam_out_of_place

_CPU = torch.device("cpu")


class AdamStates(NamedTuple):
    """What a step reads and writes: 1-d, of one length."""

    weight: Tensor  # bfloat16, float16 or float32
    master: Tensor | None  # int16 remainder, float32, None: see ``adam``
    exp_avg: Tensor  # float32
    exp_avg_sq: Tensor  # float32


def adam_out_of_place(
    old: AdamStates,
    new: AdamStates,
    grad: Tensor,
    scalars: AdamScalars,
    *,
    scale: Tensor | None = None,
    threads: int = 0,
) -> None:
    """One AdamW step from ``old`` to ``new``, which must not overlap.

    Args:
        old: [n] each, on the CPU at multiples of 256 bytes, n a multiple of 128; read.
        new: on the CPU, of the same types and length, written.
        grad: [n] bfloat16, float16 or float32.
        scalars: of ``adam_scalars``.
        scale: one fp32, multiplied with the gradient.
        threads: host threads; 0 is torch.get_num_threads().

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or ``new`` overlaps ``old``.
    """
    _check(old, new, grad)
    check_scalar("scale", scale, dtype=torch.float32, device=_CPU)
    if host_adam_out_of_place(old, new, grad, scalars, scale=scale, threads=threads):
        return
    for source, target in zip(old, new, strict=True):
        if source is not None and target is not None:
            target.copy_(source)
    adam(*new, grad, scalars, scale=scale, threads=threads)


def _check(old: AdamStates, new: AdamStates, grad: Tensor) -> None:
    count = old.weight.numel()
    check_vector("grad", grad, dtypes=FLOATS, device=_CPU, numel=count)
    if old.weight.dtype not in MASTER_DTYPES:
        raise ValueError(f"old.weight must be bfloat16, float16 or float32, not {old.weight.dtype}")
    master = MASTER_DTYPES[old.weight.dtype]
    kinds = AdamStates._fields
    wanted = (old.weight.dtype, master, torch.float32, torch.float32)
    for side, states in (("old", old), ("new", new)):
        for name, tensor, dtype in zip(kinds, states, wanted, strict=True):
            if (tensor is None) != (dtype is None):
                raise ValueError(f"{side}.{name} must be {'None' if dtype is None else dtype} for {old.weight.dtype}")
            if tensor is not None and dtype is not None:
                check_vector(f"{side}.{name}", tensor, dtypes=(dtype,), device=_CPU, numel=count)
                check_aligned(f"{side}.{name}", tensor)
    for name, source, target in zip(kinds, old, new, strict=True):
        if source is not None and target is not None and _overlap(source, target):
            raise ValueError(f"new.{name} overlaps old.{name}: pass memory of its own")


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
