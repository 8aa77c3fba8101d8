"""AdamW over a chunk: an fp32 step on an fp32 master, and the 16-bit weight that follows from it, in one pass.

    g = finished(grad, gradient_factor)         fp32; of a sum in fp32, see ``rounding``
    g = g * scale                               only where a scale is given
    g = g + p * l2                              only with coupled weight decay (Adam, not AdamW)
    p = p * decay                               decay is 1 - lr * weight_decay when decoupled, else 1
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * g) * (1 - beta2)
    p = p - (m / (sqrt(v) * inv_sqrt_bias_correction2 + eps)) * step_size
    m, v = rounded(m, v)                        only for moments in bf16: see ``stochastic_rounding``

Every operation is rounded to fp32 by itself: there is no fused multiply-add, and division and square root are correctly
rounded. The constants are computed in double on the host (``adam_scalars``). Hence the Triton kernel, the C kernel and
the reference give the same bits, except for the payload of a NaN, which the machine chooses. The caller chooses the
number of the step, and with it the bias corrections.

    weight   master               bytes read + written a parameter, gradient of the weight's type
    bf16     int16 remainder      2 + 2 + 4 + 4 + 2 read, 2 + 2 + 4 + 4 written = 26
    fp16     fp32                 4 + 4 + 4 + 2 read, 2 + 4 + 4 + 4 written = 28
    fp32     None: the weight     4 + 4 + 4 + 4 read, 4 + 4 + 4 written = 28

Moments in bf16 save 8 of these bytes.

A speculative update must leave the old states as they are, because whether gradients must be clipped is known only when
all of them are there. Then ``out`` is a second copy of the states, which takes their place later or is dropped. On the
host that moves as many bytes, because stores go around the cache, which would first read what they overwrite. Where
there is no memory for all of a copy, ``out`` is the new weight alone: 16 bytes a parameter, 12 with moments in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from protrain_kernels.adam_types import MASTER_DTYPES, MOMENT_DTYPES, AdamScalars, AdamStates
from protrain_kernels.checks import (
    LAUNCH_OPTIONS,
    check_aligned,
    check_apart,
    check_scalar,
    check_vector,
)
from protrain_kernels.host_kernels import host_adam
from protrain_kernels.launch import launch
from protrain_kernels.rounding import finished_reference, narrow
from protrain_kernels.split_master import join, join_bits, split, split_bits, widen
from protrain_kernels.stochastic_rounding import random_bits, round_moments_reference, upper_half

BLOCK = 1024
REFERENCE_SLICE = 1 << 18  # elements at a time where the reference replaces the C kernel, to bound its temporaries
_NAMES = "weight", "exp_avg", "exp_avg_sq", "grad", "master"


def adam_reference(
    weight: torch.Tensor,
    master: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    *,
    gradient_factor: float = 1.0,
    scale: torch.Tensor | None = None,
) -> None:
    """``adam`` in separate torch operations, for any shape, length and device.

    Every plan must equal, bit for bit, a plain training loop that steps with this function.
    """
    if weight.dtype == torch.bfloat16:
        assert master is not None
        p = join(weight, master)
    else:
        p = (weight if master is None else master).clone()
    g = finished_reference(grad, weight.dtype, gradient_factor=gradient_factor)
    if scale is not None:
        g = g * scale.reshape([1] * g.dim())  # torch may treat a 0-d tensor as a double constant
    if scalars.l2 != 0.0:
        g = g + p * scalars.l2
    p = p * scalars.decay
    m = exp_avg.float() * scalars.beta1 + g * scalars.one_minus_beta1
    v = exp_avg_sq.float() * scalars.beta2 + (g * g) * scalars.one_minus_beta2
    if exp_avg.dtype is torch.bfloat16:
        for moment, rounded in zip((exp_avg, exp_avg_sq), round_moments_reference(m, v, scalars.step), strict=True):
            moment.copy_(rounded)
    else:
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)
    # A square root or quotient that is computed in double and then rounded to fp32 is correctly rounded, because
    # 53 >= 2 * 24 + 2 bits. torch's fp32 functions need not be: some machines use a vector library, or multiply by a
    # reciprocal.
    root = v.to(torch.float64).sqrt_().to(torch.float32)
    denominator = root.mul_(scalars.inv_sqrt_bias_correction2).add_(scalars.eps)
    quotient = m.to(torch.float64).div_(denominator.to(torch.float64)).to(torch.float32)
    p = p - quotient.mul_(scalars.step_size)
    if weight.dtype == torch.bfloat16:
        assert master is not None
        upper, remainder = split(p)
        weight.copy_(upper)
        master.copy_(remainder)
        return
    if master is not None:
        master.copy_(p)
    weight.copy_(p)


@triton.jit(do_not_specialize_on_alignment=["scale"])
def adam_kernel(
    weight: tl.tensor,  # bf16 weights, gradients and moments are passed as int16: their bits
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    grad: tl.tensor,
    scale: tl.tensor,
    numel: tl.tensor,
    gradient_factor: tl.tensor,
    decay: tl.tensor,
    l2: tl.tensor,
    beta1: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    inv_sqrt_bias_correction2: tl.tensor,
    eps: tl.tensor,
    step_size: tl.tensor,
    step: tl.tensor,
    SPLIT: tl.constexpr,
    OWN_MASTER: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_L2: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program updates BLOCK parameters."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    g = widen(tl.load(grad + offsets, mask=mask))
    if grad.dtype.element_ty == tl.float32:
        g = widen(narrow(g * gradient_factor, weight))
    if SPLIT:
        p = join_bits(tl.load(weight + offsets, mask=mask), tl.load(master + offsets, mask=mask))
    elif OWN_MASTER:
        p = tl.load(weight + offsets, mask=mask)
    else:
        p = tl.load(master + offsets, mask=mask)
    m = widen(tl.load(exp_avg + offsets, mask=mask))
    v = widen(tl.load(exp_avg_sq + offsets, mask=mask))
    if HAS_SCALE:
        g = g * tl.load(scale)
    if HAS_L2:
        g = g + p * l2
    p = p * decay
    m = m * beta1 + g * one_minus_beta1
    v = v * beta2 + (g * g) * one_minus_beta2
    denominator = tl.sqrt_rn(v) * inv_sqrt_bias_correction2 + eps
    p = p - tl.div_rn(m, denominator) * step_size
    if exp_avg.dtype.element_ty == tl.int16:
        random = random_bits(m, v, step)
        tl.store(exp_avg + offsets, upper_half(m, random & 0xFFFF), mask=mask)
        tl.store(exp_avg_sq + offsets, upper_half(v, random >> 16), mask=mask)
    else:
        tl.store(exp_avg + offsets, m, mask=mask)
        tl.store(exp_avg_sq + offsets, v, mask=mask)
    if SPLIT:
        upper, lower = split_bits(p)
        tl.store(weight + offsets, upper, mask=mask)
        tl.store(master + offsets, lower, mask=mask)
    elif OWN_MASTER:
        tl.store(weight + offsets, p, mask=mask)
    else:
        tl.store(master + offsets, p, mask=mask)
        tl.store(weight + offsets, p.to(tl.float16), mask=mask)


def launch_adam(
    weight: torch.Tensor,
    master: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: AdamScalars,
    *,
    gradient_factor: float = 1.0,
    scale: torch.Tensor | None = None,
) -> None:
    """Launch the Triton kernel on checked tensors, without a synchronisation."""
    # Another tensor stands for a master or a scale that is not there: the kernel does not read it.
    own = weight if master is None else master
    factor = exp_avg if scale is None else scale
    numel = weight.numel()
    launch(
        adam_kernel,
        -(-numel // BLOCK),
        (weight, own, exp_avg, exp_avg_sq, grad, factor),
        numel,
        (gradient_factor, *scalars),
        (weight.dtype is torch.bfloat16, master is None, scale is not None, scalars.l2 != 0.0, BLOCK),
        LAUNCH_OPTIONS,
        device_index=weight.get_device(),
    )


def check_adam(
    weight: torch.Tensor,
    master: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    gradient_factor: float,
    scale: torch.Tensor | None,
) -> None:
    """ValueError unless ``adam`` can take these tensors."""
    numel = weight.numel()
    tensors = (weight, exp_avg, exp_avg_sq, grad) if master is None else (weight, exp_avg, exp_avg_sq, grad, master)
    check_scalar("scale", scale, dtype=torch.float32, device=weight.device)
    if gradient_factor != 1.0 and grad.dtype is not torch.float32:
        raise ValueError(
            f"gradient_factor is {gradient_factor}, and a {grad.dtype} gradient is finished already: only a float32 "
            "sum is multiplied by it"
        )
    check_vector("weight", weight, dtypes=MASTER_DTYPES, device=weight.device)
    master_dtype = MASTER_DTYPES[weight.dtype]
    if (master is None) != (master_dtype is None):
        needed = "None: the weight is its own" if master_dtype is None else f"a {master_dtype} tensor"
        raise ValueError(f"the master of a {weight.dtype} weight must be {needed}")
    grad_dtypes = dict.fromkeys((weight.dtype, torch.float32))
    allowed: tuple[Any, ...] = MASTER_DTYPES, MOMENT_DTYPES, (exp_avg.dtype,), grad_dtypes, (master_dtype,)
    for name, tensor, dtypes in zip(_NAMES, tensors, allowed, strict=False):
        check_vector(name, tensor, dtypes=dtypes, device=weight.device, numel=numel)
        check_aligned(name, tensor)
    check_apart(dict(zip(_NAMES, tensors, strict=False)))


def _checked_output(
    out: AdamStates | torch.Tensor, states: AdamStates, grad: torch.Tensor
) -> Sequence[torch.Tensor | None]:
    """The tensors that a step from checked ``states`` writes, in their order. ValueError if one does not fit."""
    new = (out, None, None, None) if isinstance(out, torch.Tensor) else out
    apart = {"grad": grad}
    for name, state, tensor in zip(AdamStates._fields, states, new, strict=True):
        if state is None:
            continue
        apart[name], new_name = state, f"out.{name}"
        if tensor is not None:
            check_vector(new_name, tensor, dtypes=(state.dtype,), device=state.device, numel=state.numel())
            check_aligned(new_name, tensor)
            apart[new_name] = tensor
        elif new is out:
            raise ValueError(f"{new_name} must be {state.dtype}, not None")
    check_apart(apart)
    return new


def adam(
    weight: torch.Tensor,  # [n] bfloat16, float16 or float32
    master: torch.Tensor | None,  # [n] int16, float32 or None
    exp_avg: torch.Tensor,  # [n] float32 or bfloat16
    exp_avg_sq: torch.Tensor,  # [n] of the same type
    grad: torch.Tensor,  # [n] the weight's type or float32
    scalars: AdamScalars,
    *,
    gradient_factor: float = 1.0,
    scale: torch.Tensor | None = None,  # one float32
    threads: int = 0,
    out: AdamStates | torch.Tensor | None = None,  # [n] each, written in place of the states
) -> None:
    """One Adam step, on the GPU with Triton or on host memory with C threads.

    Args:
        weight: [n] bfloat16, float16 or float32; n is a multiple of 128. All tensors are 1-d, contiguous, on one
            device, and start at a multiple of 256 bytes in their storage.
        master: [n] int16 remainders for a bfloat16 weight, [n] float32 for a float16 weight, None for a float32 weight.
        exp_avg: [n] momentum, float32 or bfloat16. A bfloat16 momentum is rounded at random.
        exp_avg_sq: [n] variance, of the same type as the momentum.
        grad: [n] of the weight's type, or a float32 sum, which is rounded to the weight's type; unchanged.
        scalars: the constants of this step.
        gradient_factor: multiplies a float32 sum before it is rounded. A 16-bit gradient is finished and takes none.
        scale: one float32 on the same device that multiplies the rounded gradient (clipping, loss scale). The kernel
            reads it.
        threads: the number of host threads for CPU tensors; 0 means torch.get_num_threads().
        out: where the new states are written, which leaves the old ones unchanged; or a tensor for the new weight
            alone. The types, device and layout are those of the states. None: the states are updated in place.
            Made for host memory: on a GPU the states are copied first.

    Raises:
        ValueError: a tensor has the wrong type, device, layout or length, or two share memory.
    """
    check_adam(weight, master, exp_avg, exp_avg_sq, grad, gradient_factor, scale)
    states, numel = AdamStates(weight, master, exp_avg, exp_avg_sq), weight.numel()
    new = None if out is None else _checked_output(out, states, grad)
    how: dict[str, Any] = {"gradient_factor": gradient_factor, "scale": scale}
    if not weight.is_cuda and host_adam(states, grad, scalars, new, **how, threads=threads):
        return
    if new is not None:
        copies: Any = [
            old if old is None else old.clone() if target is None else target.copy_(old)
            for old, target in zip(states, new, strict=True)
        ]
        states = AdamStates(*copies)
    if weight.is_cuda:
        launch_adam(*states, grad, scalars, **how)
        return
    for first in range(0, numel, REFERENCE_SLICE):
        part = slice(first, first + REFERENCE_SLICE)
        adam_reference(*states.part(part), grad[part], scalars, **how)
