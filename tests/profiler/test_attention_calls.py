"""The trace records the outputs and times of attention, and records none where the plain formula is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protrain.profiler.operations import AttentionCall, Operations, measured_ms
from protrain.profiler.trace import profile

CPU = torch.device("cpu")
ROWS, SEQUENCE, HEADS, WIDTH = 2, 16, 4, 32  # the tiny models have this many
Build = Callable[..., Any]


@pytest.mark.parametrize("family", ["llama", "mistral", "opt", "gpt2"])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_blocks_say_what_attention_leaves(tiny_model: Build, tiny_batch: Build, family: str, where: str) -> None:
    model, dtype = tiny_model(family), torch.bfloat16
    found = profile(model, tiny_batch(batch=ROWS, sequence=SEQUENCE), device=where, dtype=dtype)
    for block in found.blocks:
        sums = ROWS * HEADS * SEQUENCE * 4
        assert block.attention_bytes == ROWS * SEQUENCE * WIDTH * dtype.itemsize + sums
        assert block.attention_flops == 2 * 2 * ROWS * SEQUENCE * SEQUENCE * WIDTH // 2  # under a causal mask
        assert block.attention_bytes < block.saved_bytes
        assert block.attention_flops < block.forward_flops
        assert (block.attention_ms > 0) == (where == "cpu")


def test_the_plain_formula_leaves_nothing_worth_keeping(tiny_model: Build, tiny_batch: Build) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    for block in profile(model, tiny_batch(), device="cpu").blocks:
        assert (block.attention_bytes, block.attention_flops, block.attention_ms) == (0, 0, 0.0)


class _Attends(nn.Module):
    """A block with attention, whose input may need no gradient."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.trained = nn.Linear(8, 8), nn.Linear(8, 8), trained

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (2, 4)).transpose(1, 2)
        heads = heads if self.trained else heads.detach()
        return self.outer(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("trained", [True, False])
def test_attention_without_a_backward_does_not_count(trained: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *[_Attends(trained) for _ in range(3)])
    blocks = profile(model, (torch.randn(2, 6, 8),), device="cpu").blocks
    assert [block.attention_bytes > 0 for block in blocks] == [trained] * 3


def noted(sequence: int, mask: Tensor | None = None) -> AttentionCall:
    query, key, value = torch.randn(3, 1, 2, sequence, 16)
    with Operations() as operations:
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return operations.attention[0][1]


def test_equal_calls_are_timed_once_and_longer_ones_take_longer() -> None:
    mask = torch.zeros(1, 1, 1, 16).expand(1, 2, 16, 16)  # its elements overlap in memory
    calls = [noted(16), noted(2048), noted(16), noted(16, mask)]
    assert calls[0] == calls[2]
    times = {call: measured_ms(call, CPU) for call in calls}
    assert len(times) == 3
    assert 0 < times[calls[0]] < times[calls[1]]
    assert times[calls[3]] > 0
