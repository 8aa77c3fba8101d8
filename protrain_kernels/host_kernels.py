"""What runs in C on host memory: AdamW and sums of squares, by several threads and without the GIL.

Both take arguments that their callers have checked. Where there is no compiled library (see ``host_library``), the
torch reference does the work, with the same bits. A GPU's step has AdamW on the host alone: gradients are flattened,
added up and squared on the device. A CPU in the place of the device does the first two by torch.

AdamW with the split master moves 26 bytes a parameter: weight, remainder, momentum and variance are read and written
(24), and the gradient is read (2). With moments in bf16 it moves 18.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from protrain_kernels.adam_types import AdamScalars, AdamStates
from protrain_kernels.checks import tiles
from protrain_kernels.host_library import library
from protrain_kernels.rounding import TYPE_CODES, sum_of_squares_reference

_Scalars = ctypes.c_float * 12


def _call(name: str, *arguments: object) -> bool:
    """Call the C function ``name``. Returns whether there is a compiled library that has it."""
    compiled = library()
    if compiled is not None:
        getattr(compiled, name)(*arguments)
    return compiled is not None


def host_adam(
    states: AdamStates,
    grad: torch.Tensor,
    scalars: AdamScalars,
    new: Sequence[torch.Tensor | None] | None,
    *,
    gradient_factor: float,
    scale: torch.Tensor | None,
    threads: int,
) -> bool:
    """``adam`` on checked CPU tensors: in place, or into those of ``new`` that are not None."""
    weight, master, exp_avg, exp_avg_sq = states
    if threads < 0:
        raise ValueError(f"threads must be 0 (as many as torch uses) or more, not {threads}")
    return _call(
        "protrain_adam" if new is None else "protrain_adam_out_of_place",
        weight.data_ptr(),
        TYPE_CODES[weight.dtype],
        None if master is None else master.data_ptr(),
        exp_avg.data_ptr(),
        exp_avg_sq.data_ptr(),
        TYPE_CODES[exp_avg.dtype],
        grad.data_ptr(),
        TYPE_CODES[grad.dtype],
        weight.numel(),
        _Scalars(*scalars, gradient_factor, 1.0 if scale is None else scale.item()),
        threads or torch.get_num_threads(),
        *[None if tensor is None else tensor.data_ptr() for tensor in new or ()],
    )


def sum_of_squares(values: torch.Tensor, *, weight_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``sum_of_squares_reference`` of contiguous CPU values."""
    partials = torch.empty(tiles(values.numel()), dtype=torch.float32)
    done = _call(
        "protrain_sum_of_squares",
        values.data_ptr(),
        TYPE_CODES[values.dtype],
        values.numel(),
        TYPE_CODES[weight_dtype],
        partials.data_ptr(),
        torch.get_num_threads(),
    )
    return partials if done else sum_of_squares_reference(values, weight_dtype=weight_dtype)
