"""Which parameters ProTrain manages: those whose values are plain floating-point numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def is_managed(parameter: Tensor) -> bool:
    """Whether ``parameter`` is cast to the training dtype and lives in a chunk.

    Its numbers must be the weights themselves. Storage types such as fp8 mean nothing without a scale that lies
    elsewhere, and a tensor of another class (torchao's, a DTensor) has more to it than numbers. Both stay as they are.
    """
    return parameter.dtype in _DTYPES and nn.Parameter in type(parameter).__mro__
