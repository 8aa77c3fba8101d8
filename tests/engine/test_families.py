"""Families of transformers, in tiny: three offloaded steps have the losses and weights of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    NONE,
    SWAP,
    Batch,
    Loop,
    Spec,
    Trainer,
    adamw,
    assert_same,
    check_equal_to_plain,
    seeded,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain

transformers = pytest.importorskip("transformers")

VOCABULARY = 64
PLANS = (
    Spec("none", "least", (CKPT, NONE, SWAP)),
    Spec("some", "least", (SWAP, CKPT), small=True),
    Spec("none", "least", (CKPT_SWAP,)),
)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def language(*, count: int = 3, mask: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (2, 16), generator=generator)
        extra = {"attention_mask": (torch.arange(16) < torch.tensor([[16], [11]])).long()} if mask else {}
        found.append({"input_ids": ids, "labels": ids.clone(), **extra})
    return found


def images(*, count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
            "labels": torch.randint(2, (2,), generator=generator),
        }
        for _ in range(count)
    ]


def sounds(*, count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_features": torch.randn(2, 8, 32, generator=generator),
            "labels": torch.randint(3, VOCABULARY, (2, 10), generator=generator),
        }
        for _ in range(count)
    ]


def _whisper() -> Any:
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=16,
        max_target_positions=16,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )


def _gpt2() -> Any:
    return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=32)


FAMILIES: dict[str, tuple[str, Callable[[], Any], Callable[[], list[Batch]]]] = {
    "t5": ("AutoModelForSeq2SeqLM", _t5, lambda: language(mask=True)),
    "whisper": ("AutoModelForSpeechSeq2Seq", _whisper, sounds),
    "mixtral": (
        "AutoModelForCausalLM",
        lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=1),
        language,
    ),
    "albert": (
        "AutoModelForMaskedLM",
        lambda: transformers.AlbertConfig(**SIZES, embedding_size=16, num_hidden_groups=1, hidden_dropout_prob=0.1),
        language,
    ),
    "qwen2": ("AutoModelForCausalLM", lambda: transformers.Qwen2Config(**GROUPED, tie_word_embeddings=True), language),
    "gemma2": ("AutoModelForCausalLM", lambda: transformers.Gemma2Config(**GROUPED, head_dim=8), language),
    "phi": ("AutoModelForCausalLM", lambda: transformers.PhiConfig(**SIZES, resid_pdrop=0.1), language),
    "gpt_neox": ("AutoModelForCausalLM", lambda: transformers.GPTNeoXConfig(**SIZES), language),
    "falcon": (
        "AutoModelForCausalLM",
        lambda: transformers.FalconConfig(**SIZES, new_decoder_architecture=False, hidden_dropout=0.1),
        language,
    ),
    "bloom": (
        "AutoModelForCausalLM",
        lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4),
        lambda: language(mask=True),
    ),
    "bert": ("AutoModelForMaskedLM", lambda: transformers.BertConfig(**SIZES), lambda: language(mask=True)),
    "vit": (
        "AutoModelForImageClassification",
        lambda: transformers.ViTConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            hidden_dropout_prob=0.1,
        ),
        images,
    ),
    "mamba": (
        "AutoModelForCausalLM",
        lambda: transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=3),
        language,
    ),
}


def maker(family: str) -> Callable[[], nn.Module]:
    kind, config, _ = FAMILIES[family]

    def make() -> nn.Module:
        with seeded():
            model: nn.Module = getattr(transformers, kind).from_config(config())
        return model

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, device: torch.device) -> None:
    """Half of the families in either type and half under either half of the plans, as models of structures are."""
    batches, loop, number = FAMILIES[family][2](), Loop(max_norm=0.5, loss=_loss), list(FAMILIES).index(family)
    dtype, specs = (torch.float32, torch.bfloat16)[number % 2], PLANS[number // 2 % 2 :: 2]
    check_equal_to_plain(maker(family), batches, device=device, dtype=dtype, loop=loop, specs=specs)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.parametrize("family", ["t5", "qwen2", "mamba", "gpt2"])
def test_generation_between_steps(family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gpt2", ("AutoModelForCausalLM", _gpt2, language))
    batches = FAMILIES[family][2]()

    def run(model: nn.Module, optimizer: Trainer) -> list[Any]:
        found: list[Any] = []
        for batch in batches:
            found += Loop(scheduler=False).run(model, optimizer, [batch])
            model.eval()
            generate: Any = model.generate
            prompt = batch["input_ids"][:, :4].to(device)
            options = {"max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
            found.append(generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options).tolist())
            torch.manual_seed(3)
            found.append(generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, **options).tolist())
            model.train()
        return [found, states(model, optimizer)]

    plain = maker(family)()
    expected = run(*prepare_plain(plain, adamw(plain), device=device, dtype=torch.float32))
    for spec in PLANS:
        model = maker(family)()
        found = run(*wrap_under(spec, model, adamw(model), batches[0], device=device))
        assert found[0] == expected[0], str(spec)
        assert_same(found[1], expected[1])
