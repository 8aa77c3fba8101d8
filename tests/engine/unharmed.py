"""What tests of misuse share: wrapped models, and that one goes on as if nothing had happened to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import CKPT, NONE, SWAP, Spec, adamw, assert_same, states, wrap_under

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


def train(model: nn.Module, optimizer: ProTrainOptimizer, batch: Batch, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_unharmed(found: Wrapped, untouched: Wrapped, batch: Batch) -> None:
    """``found`` goes on exactly as a model to which nothing happened."""
    assert train(*found, batch, steps=2) == train(*untouched, batch, steps=2)
    assert_same(states(*found), states(*untouched))
