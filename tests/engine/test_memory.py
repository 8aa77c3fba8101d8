"""Memory: a plan that was chosen never runs out, and what it predicts is the true peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.harness import CKPT, CKPT_SWAP, NONE, SWAP, Spec, adamw, wrap_under
from tests.engine.true_memory import (
    VOCABULARY,
    make_batch,
    make_model,
    plans_within_budgets,
    true_peak_bytes,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("gpt2", torch.bfloat16), ("llama", torch.float32), ("t5", torch.float32)],
)
def test_the_true_peak_keeps_within_every_budget(family: str, dtype: torch.dtype) -> None:
    plans = {
        str(plan)
        for plan in plans_within_budgets(lambda: make_model(family), make_batch(), dtype, count=3, least_ratio=2.0)
    }
    assert len(plans) >= 3, "the budget hardly changes the plan"


@pytest.mark.parametrize(
    ("family", "vocabulary", "modes"),
    [
        *(("gpt2", VOCABULARY, modes) for modes in ((NONE,), (SWAP, CKPT, NONE, NONE))),
        *(("llama", VOCABULARY, modes) for modes in ((NONE,), (SWAP,), (CKPT, CKPT, CKPT, SWAP))),
        *(("llama", 4096, modes) for modes in ((NONE,), (CKPT_SWAP,))),
    ],
    ids=str,
)
def test_the_prediction_is_the_true_peak_and_a_margin(family: str, vocabulary: int, modes: Any) -> None:
    """In 16 bits LLaMA's norms save nothing of their inputs; with many words nothing takes as much as the loss.

    What the last block moves is gone by then: the norm lies between.
    """
    model, batch = make_model(family, vocabulary), make_batch()
    spec = Spec("some", "least", modes)
    model, optimizer = wrap_under(spec, model, adamw(model), batch, device=CPU, dtype=torch.bfloat16)
    predicted = optimizer.plan.device_bytes
    assert 1.0 <= predicted / true_peak_bytes(model, optimizer, batch) <= 1.025, f"{predicted} bytes predicted"


@pytest.mark.slow
@pytest.mark.parametrize(
    "modes",
    [(NONE,), (SWAP,), (SWAP, CKPT, NONE), (CKPT_SWAP,), (CKPT_SWAP, CKPT, NONE)],
    ids=lambda m: m[0].value + str(len(m)),
)
def test_accumulation_keeps_within_the_budget(modes: Any) -> None:
    """Sums are where the plan has them, with no byte to spare."""
    batch = make_batch()
    for sums in (False, True) if modes == (NONE,) else (False,):
        model = make_model("llama")
        spec = Spec("none" if CKPT in modes else "some", "least", modes, sums=sums)
        options: Any = {"device": CPU, "dtype": torch.bfloat16, "accumulation": 2}
        model, optimizer = wrap_under(spec, model, adamw(model), batch, tight=True, **options)
        assert (optimizer.plan.n_device_sum > 0) == sums
        peak_bytes = true_peak_bytes(model, optimizer, batch, backwards=2)
        assert peak_bytes <= optimizer.plan.device_bytes
        assert peak_bytes > 0.8 * optimizer.plan.device_bytes


@pytest.mark.slow
def test_attention_that_is_kept_is_predicted() -> None:
    """Of 64 tokens it takes as much as the input; moved, it leaves the device."""
    peaks = {}
    for modes in ((CKPT,), (CKPT_SWAP,)):
        for attention in (False, True):
            model, batch = make_model("llama"), make_batch()
            spec = Spec("none", "least", modes, attention=attention)
            model, optimizer = wrap_under(spec, model, adamw(model), batch, device=CPU, dtype=torch.bfloat16)
            peaks[modes, attention] = true_peak_bytes(model, optimizer, batch)
            predicted = optimizer.plan.device_bytes
            assert 1.0 <= predicted / peaks[modes, attention] <= 1.04, f"{predicted} bytes predicted"
    kept, moved = (peaks[modes, True] - peaks[modes, False] for modes in ((CKPT,), (CKPT_SWAP,)))
    input_bytes = batch["input_ids"].numel() * 64 * 2
    assert kept >= 3 * input_bytes, "of four blocks"
    assert moved <= 2 * input_bytes
