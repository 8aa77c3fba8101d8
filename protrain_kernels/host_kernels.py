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


def _threads(threads: int) -> int:
    if threads < 0:
        raise ValueError(f"threads must be 0 (as many as torch uses) or more, not {threads}")
    return threads or torch.get_num_threads()


def _adam_arguments(
    weight: torch.Tensor,
    master: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    gradient_factor: float,
    scale: torch.Tensor | None,
    threads: int,
) -> tuple[object, ...]:
    """The first arguments of both C functions of AdamW."""
    return (
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
        _threads(threads),
    )


def host_adam(
    weight: torch.Tensor,
    master: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    *,
    gradient_factor: float = 1.0,
    scale: torch.Tensor | None = None,
    threads: int = 0,
) -> bool:
    """``adam`` on checked CPU tensors."""
    states = weight, master, exp_avg, exp_avg_sq
    return _call("protrain_adam", *_adam_arguments(*states, grad, scalars, gradient_factor, scale, threads))


def host_adam_out_of_place(
    old: AdamStates,
    new: Sequence[torch.Tensor | None],
    grad: torch.Tensor,
    scalars: AdamScalars,
    *,
    gradient_factor: float = 1.0,
    scale: torch.Tensor | None = None,
    threads: int = 0,
) -> bool:
    """``adam_out_of_place`` on checked tensors. It writes those of ``new`` that are not None."""
    return _call(
        "protrain_adam_out_of_place",
        *_adam_arguments(*old, grad, scalars, gradient_factor, scale, threads),
        *(None if tensor is None else tensor.data_ptr() for tensor in new),
    )


def host_sum_of_squares(values: torch.Tensor, partials: torch.Tensor, *, weight_dtype: torch.dtype) -> bool:
    """``sum_of_squares`` on checked CPU tensors."""
    return _call(
        "protrain_sum_of_squares",
        values.data_ptr(),
        TYPE_CODES[values.dtype],
        values.numel(),
        TYPE_CODES[weight_dtype],
        partials.data_ptr(),
        torch.get_num_threads(),
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
    """``flatten`` on checked CPU tensors, whose ``rows`` are those of their plan: one call, as each takes time."""
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


def host_split(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> bool:
    """``split`` on checked CPU tensors."""
    memory = master.data_ptr(), weight.data_ptr(), remainder.data_ptr()
    return _call("protrain_split", *memory, master.numel(), torch.get_num_threads())


def host_join(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> bool:
    """``join`` on checked CPU tensors."""
    memory = weight.data_ptr(), remainder.data_ptr(), master.data_ptr()
    return _call("protrain_join", *memory, master.numel(), torch.get_num_threads())
