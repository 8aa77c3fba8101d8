"""What tests of misuse share: wrapped models, and that one goes on as if nothing had happened to it.

What goes on is compared with the plain loop, which is run once for each type and number of steps before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import CKPT, NONE, SWAP, Spec, Trainer, adamw, assert_same, states, wrap_under
from tests.engine.plain_loop import prepare_plain

CPU = torch.device("cpu")
OFFLOADED = Spec("none", "least", (NONE, CKPT, SWAP))
MIXED = Spec("some", "least", (SWAP, CKPT, NONE))
RESIDENT = Spec("all", "least", (NONE,))
Batch = dict[str, Tensor]
Wrapped = tuple[nn.Module, ProTrainOptimizer]
Wrap = Callable[..., Wrapped]


def wrapper(tiny_model: Callable[..., nn.Module], batch: Batch) -> Wrap:
    """``wrapped(spec=OFFLOADED, **options)``: a tiny LLaMA and its optimizer, wrapped; always the same weights."""

    def wrapped(spec: Spec = OFFLOADED, **options: Any) -> Wrapped:
        model = tiny_model("llama")
        return wrap_under(spec, model, adamw(model), batch, device=CPU, **options)

    return wrapped


def train(model: nn.Module, optimizer: Trainer, batch: Batch, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


_outcomes: dict[tuple[torch.dtype, int], tuple[list[float], dict[str, Tensor]]] = {}


def assert_unharmed(
    found: Wrapped,
    tiny_model: Callable[..., nn.Module],
    batch: Batch,
    *,
    dtype: torch.dtype = torch.float32,
    steps_before: int = 0,
) -> None:
    """``found`` goes on exactly as a tiny LLaMA to which nothing happened but ``steps_before`` steps."""
    if (dtype, steps_before) not in _outcomes:
        model = tiny_model("llama")
        plain = prepare_plain(model, adamw(model), device=CPU, dtype=dtype)
        train(*plain, batch, steps=steps_before)
        _outcomes[dtype, steps_before] = train(*plain, batch, steps=2), states(*plain)
    losses, final = _outcomes[dtype, steps_before]
    assert train(*found, batch, steps=2) == losses
    assert_same(states(*found), final)
