"""What tests of state share: the plans that it comes from and goes to, one loop, and wrapped models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import CKPT, NONE, SWAP, Batch, Loop, Spec, adamw, wrap_under

FIRST = Spec("none", "least", (CKPT, NONE))
SECOND = Spec("some", "middle", (SWAP, NONE, CKPT), small=True)
RESIDENT = Spec("all", "least", (NONE,))
SPECS = (FIRST, SECOND, RESIDENT)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOOP = Loop(max_norm=0.5, scheduler=False)

Wrapped = tuple[Any, ProTrainOptimizer]
Make = Callable[..., Wrapped]


def maker(tiny_model: Callable[..., nn.Module], batch: Batch, device: torch.device) -> Make:
    """``make(spec, dtype, family, seed)``: a wrapped GPT-2 (with tied embeddings) or another family."""

    def make(spec: Spec = FIRST, dtype: torch.dtype = torch.float32, family: str = "gpt2", seed: int = 0) -> Wrapped:
        model = tiny_model(family, seed)
        return wrap_under(spec, model, adamw(model), batch, device=device, dtype=dtype)

    return make
