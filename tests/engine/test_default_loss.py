"""wrap without ``chunked_loss``: the loss is computed in pieces where it is known to be the same, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.forward.chunked_loss import can_chunk, chunk_loss, is_chunked
from tests.engine.harness import Batch, Loop, adamw, assert_same, plain_run, states

transformers = pytest.importorskip("transformers")
Build = Callable[..., nn.Module]


class Around(nn.Module):
    """A user's module, with a loss of its own beside that of the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        out = self.inner(input_ids=input_ids, labels=labels)
        return out.logits.float().square().mean() if labels is None else 2 * out.loss


def _cohere() -> nn.Module:
    """It scales its logits."""
    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.CohereConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model: nn.Module = transformers.CohereForCausalLM(config)
    return model


def _adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    return adapted


def _chosen(model: nn.Module, batch: Batch, **options: Any) -> bool:
    """Whether wrap, if it is not told, computes the loss of ``model`` in pieces. The plan says the same."""
    model, optimizer = protrain.wrap(
        model, adamw(model), example_batch=batch, device="cpu", device_memory="1GiB", progress=False, **options
    )
    assert optimizer.plan.chunked_loss == is_chunked(model)
    return is_chunked(model)


def test_it_is_computed_in_pieces_where_it_is_the_same(tiny_model: Build, tiny_batch: Callable[..., Batch]) -> None:
    batch = tiny_batch()
    tokens = batch["input_ids"]
    assert _chosen(tiny_model("llama"), batch)
    assert _chosen(Around(tiny_model("llama")), batch)
    assert _chosen(_adapted(tiny_model("llama")), batch)
    assert not _chosen(tiny_model("llama"), batch, chunked_loss=False)
    assert not _chosen(tiny_model("llama"), {"input_ids": tokens})
    assert not _chosen(tiny_model("llama"), {"input_ids": tokens, "labels": None})
    assert not _chosen(Around(tiny_model("llama")), (tokens, tokens))
    assert not _chosen(_cohere(), batch)
    assert not _chosen(tiny_model("t5"), batch)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_first_call_decides_where_there_is_no_example_batch(
    labelled: bool, tiny_model: Build, tiny_batch: Callable[..., Batch]
) -> None:
    model = Around(tiny_model("llama"))
    wrapped, optimizer = protrain.wrap(model, adamw(model), device="cpu", device_memory="1GiB", progress=False)
    batch = tiny_batch() if labelled else {"input_ids": tiny_batch()["input_ids"]}
    wrapped(**batch).backward()
    optimizer.step()
    assert (is_chunked(wrapped), optimizer.plan.chunked_loss) == (labelled, labelled)


def test_the_bits_are_those_of_a_plain_loop_with_this_loss(tiny_model: Build, tiny_batch: Callable[..., Batch]) -> None:
    def with_this_loss() -> nn.Module:
        model = tiny_model("llama")
        assert can_chunk(model)
        chunk_loss(model)
        return model

    batches, loop, device = [tiny_batch(seed=seed) for seed in range(3)], Loop(max_norm=0.5), torch.device("cpu")
    values, expected = plain_run(with_this_loss, batches, loop=loop, device=device, dtype=torch.float32)
    model = tiny_model("llama")
    model, optimizer = protrain.wrap(
        model, adamw(model), example_batch=batches[0], device="cpu", device_memory="600KiB", progress=False
    )
    assert optimizer.plan.chunked_loss
    assert loop.run(model, optimizer, batches) == values
    assert_same(states(model, optimizer), expected)
