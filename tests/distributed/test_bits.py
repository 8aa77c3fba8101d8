"""The number of ranks never changes the result: W ranks have the bits of one process with W micro-batches a step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.pool import on_ranks
from tests.distributed.training import Outcome, Training, on_rank, plain
from tests.engine.harness import CKPT, CKPT_SWAP, NONE, SWAP, Spec, assert_same, seeded

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH, SEQUENCE = 64, 32, 16
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
}
SPECS = (
    Spec("all", "all", (NONE,)),
    Spec("all", "least", (CKPT,)),
    Spec("some", "middle", (SWAP, CKPT, NONE), small=True),
    Spec("none", "least", (CKPT_SWAP, NONE), speculate=True),
    Spec("none", "middle", (NONE, CKPT), speculate=True),
    Spec("none", "least", (CKPT,), stream=True),
)


def config(family: str) -> Any:
    """The configuration of a small model without dropout."""
    if family == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": SEQUENCE}
        return transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if family == "opt":
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 128}
        return transformers.OPTConfig(
            **sizes, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=SEQUENCE, dropout=0.0
        )
    if family == "mistral":
        return transformers.MistralConfig(**LLAMA, sliding_window=SEQUENCE // 2)
    return transformers.LlamaConfig(**LLAMA)


def make(family: str) -> nn.Module:
    with seeded():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config(family))
    return model


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (count, 2, SEQUENCE), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids]


def check(size: int, training: Training, specs: tuple[Spec, ...] = SPECS) -> None:
    """Losses, norms and states on ``size`` ranks, under all ``specs``, are those of the plain loop."""
    expected = plain(training, size)
    assert len({loss for losses in expected.losses for loss in losses}) > 1, "the plain loop does not train"
    by_rank: list[list[Outcome]] = on_ranks(size, on_rank, size, training, specs)
    for rank, outcomes in enumerate(by_rank):
        for spec, outcome in zip(specs, outcomes, strict=True):
            where = f"rank {rank} under {spec}"
            assert outcome.losses == [losses[rank::size] for losses in expected.losses], where
            assert outcome.norms == expected.norms, where
            assert_same(outcome.states, expected.states, where=where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "size", "reduction", "specs"),
    [
        ("gpt2", "bfloat16", 2, "mean", SPECS[::3]),
        ("mistral", "bfloat16", 3, "sum", SPECS[2:4]),
        ("opt", "float16", 2, "sum", SPECS[4:]),
    ],
)
def test_families(family: str, dtype: str, size: int, reduction: str, specs: tuple[Spec, ...]) -> None:
    check(size, Training(functools.partial(make, family), batches, dtype=dtype, reduction=reduction, steps=4), specs)


class Adapted(nn.Module):
    """A linear layer with a LoRA adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, base.get_parameter("weight").shape[0], bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return out


def make_adapted() -> nn.Module:
    """A frozen model with adapters."""
    with seeded():
        model = make("llama").requires_grad_(False)
        for module in [each for name, each in model.named_modules() if name.endswith("self_attn")]:
            for name in ("q_proj", "v_proj"):
                setattr(module, name, Adapted(module.get_submodule(name)))
    return model


@pytest.mark.slow
def test_adapters_of_a_frozen_model() -> None:
    check(2, Training(make_adapted, batches, dtype="float16", reduction="sum", steps=4, accumulate=2), SPECS[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "how", "specs"),
    [
        (2, {"dtype": "bfloat16", "accumulate": 3, "no_sync": True}, SPECS[::4]),
        (3, {"reduction": "sum", "accumulate": 2}, SPECS[1::2]),
        (3, {"reduction": "sum", "accumulate": 2, "no_sync": True, "inside": True, "max_norm": None}, SPECS[2:3]),
        (2, {"dtype": "bfloat16", "chunked": True}, SPECS[3:4]),
    ],
)
def test_several_backwards_updates_inside_backward_and_the_chunked_loss(
    size: int, how: dict[str, Any], specs: tuple[Spec, ...]
) -> None:
    check(size, Training(functools.partial(make, "llama"), batches, steps=3, **how), specs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "family", "dtype"),
    [
        (2, "gpt2", "bfloat16"),
        (2, "llama", "float32"),
        (2, "opt", "float16"),
        (4, "llama", "bfloat16"),
        (8, "llama", "bfloat16"),
    ],
)
def test_several_gpus(size: int, family: str, dtype: str) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    check(size, Training(functools.partial(make, family), batches, dtype=dtype, device="cuda", steps=10))
