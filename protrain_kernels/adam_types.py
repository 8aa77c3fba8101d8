"""What AdamW takes: the states of parameters with their types, and the constants of a step."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

STEPS_APART = 1 << 24  # how many step numbers fp32 represents; the random bits count steps modulo this
MASTER_DTYPES = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.float32,
    torch.float32: None,
}  # by the type of the weight
MOMENT_DTYPES = (torch.float32, torch.bfloat16)


class AdamStates(NamedTuple):
    """The tensors that a step reads and writes, 1-d and of one length."""

    weight: Tensor  # bfloat16, float16 or float32
    master: Tensor | None  # int16 remainder, float32 or None: see ``adam``
    exp_avg: Tensor  # float32 or bfloat16
    exp_avg_sq: Tensor  # of the same type

    def part(self, elements: slice) -> AdamStates:
        """Views of some elements of each."""
        master = None if self.master is None else self.master[elements]
        return AdamStates(self.weight[elements], master, self.exp_avg[elements], self.exp_avg_sq[elements])


class AdamScalars(NamedTuple):
    """The constants of one step in the order in which the kernels take them. Made by ``adam_scalars``.

    Each is a double that fp32 represents exactly.
    """

    decay: float
    l2: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias_correction2: float
    eps: float
    step_size: float
    step: float  # modulo STEPS_APART


def adam_scalars(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, decoupled: bool
) -> AdamScalars:
    """The constants of a step, computed in double and rounded to fp32 once.

    Args:
        lr: learning rate, at least 0.
        beta1: decay of the momentum, in [0, 1).
        beta2: decay of the variance, in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: at least 0.
        step: the number of this step; the first is 1.
        decoupled: True for AdamW's decay of the weight, False for Adam's term in the gradient.

    Raises:
        ValueError: a value is out of its range.
    """
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, not {value!r}")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be in [0, 1), not {value!r}")
    if not 1 <= step < math.inf or step != int(step):
        raise ValueError(f"step counts from 1, in whole numbers, not {step!r}")
    scalars = AdamScalars(
        decay=_fp32(1.0 - lr * weight_decay if decoupled else 1.0),
        l2=_fp32(0.0 if decoupled else weight_decay),
        beta1=_fp32(beta1),
        one_minus_beta1=_fp32(1.0 - beta1),
        beta2=_fp32(beta2),
        one_minus_beta2=_fp32(1.0 - beta2),
        inv_sqrt_bias_correction2=_fp32(1.0 / math.sqrt(1.0 - beta2**step)),
        eps=_fp32(eps),
        step_size=_fp32(lr / (1.0 - beta1**step)),
        step=float(step % STEPS_APART),
    )
    if not all(map(math.isfinite, scalars)):
        raise ValueError(
            f"float32 cannot hold the constants of a step with lr {lr!r}, eps {eps!r} and weight_decay "
            f"{weight_decay!r}: give smaller ones"
        )
    return scalars


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value
