"""The memory of kept attention outputs is predicted, and freed after use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine.harness import CKPT, CKPT_SWAP, Spec, adamw, wrap_under
from tests.engine.true_memory import make_batch, make_model, peak_of_second_step, true_peak_bytes

CPU = torch.device("cpu")


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


class _AttentionLast(nn.Module):
    """Its backward peaks behind attention's: by then what attention put out is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)
        self.heads, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.silu(self.up(x)) * self.up(x).tanh())
        query, key, value = self.heads(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        hidden = nn.functional.scaled_dot_product_attention(query, key, value)
        return x + self.out(hidden.transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_attention_is_given_up_where_it_was_used() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4, 64, 64, dtype=torch.bfloat16)
    model: nn.Module = nn.Sequential(*[_AttentionLast() for _ in range(4)])
    spec = Spec("all", "least", (CKPT,), attention=True)
    model, optimizer = wrap_under(spec, model, adamw(model), (rows,), device=CPU, dtype=torch.bfloat16)
    peak_bytes = peak_of_second_step(
        optimizer, lambda: model(rows), [rows], loss=lambda output: output.float().square().mean()
    )
    assert 1.0 <= optimizer.plan.device_bytes / peak_bytes <= 1.05
