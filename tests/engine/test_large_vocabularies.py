"""Embeddings and heads larger than blocks: in large chunks, others of a block, with the same bits and as planned."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from protrain.common.batch import loss_of
from protrain.planning.plan import layout_of
from protrain.planning.schedule import Fetches, most_held
from tests.engine.harness import Loop, Spec, adamw, check_equal_to_plain, wrap_under
from tests.engine.profiles import shared_profile
from tests.engine.true_memory import make_batch, make_model

WORDS = 1500  # by 64: 96,000 elements, of a block 40,000 to 50,000
BATCH = make_batch(1)  # in bf16 a CPU multiplies by a large table slowly


def make(family: str) -> nn.Module:
    """``family`` may end in "-frozen": then only blocks are trained, as with adapters."""
    model = make_model(family.removesuffix("-frozen"), WORDS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not family.endswith("-frozen") or "layers" in name)
    return model


@pytest.mark.parametrize(
    ("family", "persist", "mode", "inside"),
    [
        ("llama", "none", "c", True),
        ("llama", "some", "c", False),
        ("llama", "all", "c", True),
        ("llama-frozen", "none", "s", True),
        ("llama-frozen", "some", "n", False),
        ("gpt2", "none", "c", False),
        ("gpt2", "some", "c", True),
        ("gpt2", "all", "c", False),
        ("t5", "none", "s", False),
        ("t5", "some", "n", True),
    ],
)
def test_bits(family: str, persist: str, mode: str, inside: bool, device: torch.device) -> None:
    """Every family and every plan with updates inside backward, and with clipping."""
    loop, specs = Loop() if inside else Loop(max_norm=0.5), [Spec(persist, "least", mode)]
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "step_during_backward": inside}
    check_equal_to_plain(partial(make, family), [BATCH] * 2, run=loop.run, specs=specs, **options)


@pytest.mark.parametrize(
    ("family", "persist"), [("llama", "none"), ("llama", "some"), ("llama-frozen", "none"), ("gpt2", "none")]
)
def test_chunks_are_fetched_as_predicted(family: str, persist: str) -> None:
    model = make(family)
    how: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    profile = shared_profile(model, BATCH, optimizer=adamw(model), **how)
    wrapped, optimizer = wrap_under(Spec(persist, "least", "c"), model, adamw(model), BATCH, **how)
    plan, layout = optimizer.plan, layout_of(profile, optimizer.plan)
    assert any(layout.is_large(chunk) for chunk in layout.chunks)
    issued = []
    for _ in range(2):
        loss_of(wrapped(**BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()  # waits, so that no upload is late
        issued.append(optimizer.report().fetches)
    visits = [*profile.calls, *reversed(profile.calls)]
    held = [layout.unit_chunks[unit] for unit in visits]
    n_large = [n_large for _, n_large in most_held(profile, layout)]
    fetches = Fetches(visits, held, layout, n_large).of(plan.n_persist, plan.n_buffer)
    assert issued[1] - issued[0] == sum(map(len, fetches))
