"""Operators are counted by their products or bytes, and attention by its outputs and times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protrain.forward.compilation import compile_blocks, graphs_alone
from protrain.profiler.blocks import find_blocks
from protrain.profiler.operations import AttentionCall, Operations, measured_ms, storage_key
from protrain.profiler.trace import profile
from tests.profiler.test_trace import saved_by_block

ROWS, WIDTH = 8, 16
SIZE = ROWS * WIDTH * 4


def chain(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two operators before a product and two after it. The first one saves something for backward."""
    scaled = (x * 2 + 1) @ weight
    relu = scaled.relu()
    return relu, relu * x


def test_operators_that_are_no_products_count_by_their_bytes() -> None:
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    with Operations() as found:
        relu, last = chain(x, weight)
    assert found.flops == 2 * ROWS * WIDTH * WIDTH
    assert found.traffic_bytes == (2 + 2 + 2 + 3) * SIZE
    # Fused operators move x once, the product's input, and the product's result.
    assert found.fused_bytes == 3 * SIZE
    found.write({storage_key(relu), storage_key(last), storage_key(x)})
    assert found.fused_bytes == 5 * SIZE


@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_mask_leaves_half_of_attentions_products(causal: bool) -> None:
    query, key, value = (torch.randn(2, 4, ROWS, 8) for _ in range(3))
    with Operations() as found:
        nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    assert found.flops == 2 * (2 * 4 * ROWS) * (ROWS // (2 if causal else 1)) * (8 + 8)


@pytest.mark.parametrize("double", [False, True])
def test_a_product_with_a_4bit_weight_is_a_product(double: bool) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, compress_statistics=double)
    layer.to("cpu")
    x = torch.randn(2, ROWS, 64, requires_grad=True)
    with Operations() as found:
        layer(x)
    assert (found.flops, found.traffic_bytes) == (2 * (2 * ROWS) * 64 * 128, 0)


def test_views_move_nothing_and_what_is_expanded_little() -> None:
    x, row = torch.randn(ROWS, WIDTH), torch.randn(WIDTH)
    with Operations() as found:
        x.view(-1)[:5].unsqueeze(0)
        assert (found.flops, found.traffic_bytes, found.fused_bytes) == (0, 0, 0)
        row.expand(ROWS, WIDTH) + x
    assert found.traffic_bytes == 2 * SIZE + WIDTH * 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_meta_device_knows_what_compiled_blocks_save(
    tiny_model: Callable[..., Any], tiny_batch: Callable[..., Any], family: str
) -> None:
    torch._dynamo.reset()  # numbers of which it has seen other values would be inputs of a graph, and saved
    model, batch = tiny_model(family, num_hidden_layers=2), tiny_batch()
    blocks = [model.get_submodule(path) for path in find_blocks(model)]
    plain = profile(model, batch, device="meta", dtype=torch.float32)
    compile_blocks(blocks, on_meta=True)
    found = profile(model, batch, device="meta", dtype=torch.float32)
    assert (plain.compiled, found.compiled) == (False, True)
    torch._dynamo.reset()
    for block in blocks:
        vars(block).pop("forward", None)
    truth = saved_by_block(model, batch, compiled=partial(torch.compile, backend=graphs_alone()))
    assert {block.name: block.saved_bytes for block in found.blocks} == truth
    for block, eager in zip(found.blocks, plain.blocks, strict=True):
        assert block.saved_bytes <= eager.saved_bytes
        assert block.forward_traffic_bytes < eager.forward_traffic_bytes
        assert (block.forward_flops, block.attention_bytes) == (eager.forward_flops, eager.attention_bytes)
    assert torch.nn.functional.scaled_dot_product_attention.__module__ != "protrain.profiler.meta_device"
    torch._dynamo.reset()


CPU = torch.device("cpu")
SEQUENCES, SEQUENCE, HEADS, HIDDEN = 2, 16, 4, 32  # the tiny models have this many
Build = Callable[..., Any]


@pytest.mark.parametrize("family", ["llama", "mistral", "opt", "gpt2"])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_blocks_say_what_attention_leaves(tiny_model: Build, tiny_batch: Build, family: str, where: str) -> None:
    model, dtype = tiny_model(family), torch.bfloat16
    found = profile(model, tiny_batch(batch=SEQUENCES, sequence=SEQUENCE), device=where, dtype=dtype)
    for block in found.blocks:
        sums = SEQUENCES * HEADS * SEQUENCE * 4
        assert block.attention_bytes == SEQUENCES * SEQUENCE * HIDDEN * dtype.itemsize + sums
        assert block.attention_flops == 2 * 2 * SEQUENCES * SEQUENCE * SEQUENCE * HIDDEN // 2  # under a causal mask
        assert block.attention_bytes < block.saved_bytes
        assert block.attention_flops < block.forward_flops
        assert (block.attention_ms > 0) == (where == "cpu")


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
