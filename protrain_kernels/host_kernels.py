"""The host side of every kernel: multi-threaded C on CPU memory, called without the GIL.

A ``host_*`` function takes arguments that its public counterpart has checked. Where there is no compiled library (see
``host_library``) it does nothing and returns False, and its caller runs the torch reference, with the same bits.

AdamW with the split master moves 26 bytes a parameter: weight, remainder, momentum and variance are read and written
(24), and the gradient is read (2). With moments in bf16 it moves 18. The gradient's kernels move each byte once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from protrain_kernels.adam_types import AdamScalars, AdamStates
from protrain_kernels.host_library import library
from protrain_kernels.rounding import TYPE_CODES
from protrain_kernels.slices import Slice

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


def host_flatten(
    tensors: Sequence[torch.Tensor],
    rows: torch.Tensor,
    chunk: torch.Tensor,
    partials: torch.Tensor | None,
    *,
    accumulate: bool,
    weight_dtype: torch.dtype,
) -> bool:
    """``flatten`` on checked CPU tensors, whose ``rows`` are those of their table: one call, as each takes time."""
    return _call(
        "protrain_flatten",
        len(tensors),
        (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors]),
        TYPE_CODES[tensors[0].dtype],
        rows.data_ptr(),
        chunk.data_ptr(),
        TYPE_CODES[chunk.dtype],
        None if partials is None else partials.data_ptr(),
        TYPE_CODES[weight_dtype],
        int(accumulate),
        torch.get_num_threads(),
    )


def host_fold(
    pieces: torch.Tensor,
    slices: Sequence[Slice],
    gradient: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    factor: float,
    partials: torch.Tensor | None,
) -> bool:
    """``fold`` on checked CPU tensors."""
    sums = None if partials is None else partials.data_ptr()
    common = (
        *(pieces.data_ptr(), TYPE_CODES[pieces.dtype], len(pieces), pieces.stride(0)),
        None if gradient is None else gradient.data_ptr(),
        TYPE_CODES[pieces.dtype if gradient is None else gradient.dtype],
        None if accumulator is None else accumulator.data_ptr(),
        factor,
    )
    return all(
        _call(
            "protrain_fold",
            *common,
            *(part.offset, part.numel, part.first, part.parameter_numel),
            None if sums is None else sums + 4 * part.partial_offset,
            torch.get_num_threads(),
        )
        for part in slices
    )
