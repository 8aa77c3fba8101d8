"""Models by name: published shapes with random weights, which are built without their weights ever existing whole.

Dropout is off and there are no special tokens, as in pre-training on plain text. The shapes come from the model cards
of OPT (arXiv 2205.01068), LLaMA-2 (2307.09288; 34B as released in Code Llama, 2308.12950), Llama 3 (2407.21783; 1B as
released in Llama 3.2) and Mistral 7B (2310.06825). The large GPT-2 shapes are no released models: offloading papers use
these hidden sizes and depths, with heads of 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCRATCH_LEARNING_RATE = 3e-4  # the default peak for random weights


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A named causal language model."""

    family: str  # transformers' model_type
    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None  # None means as many as heads
    mlp: int | None = None  # None means 4 x hidden
    vocabulary: int
    positions: int
    tied: bool = False  # whether input and output embedding are one parameter
    sequence: int = 1024  # the default of the command line, as in the paper
    learning_rate: float = SCRATCH_LEARNING_RATE  # the default of the command line


def _gpt2(hidden: int, layers: int, heads: int) -> Shape:
    return Shape(family="gpt2", hidden=hidden, layers=layers, heads=heads, vocabulary=50257, positions=1024, tied=True)


def _opt(hidden: int, layers: int, heads: int) -> Shape:
    return Shape(family="opt", hidden=hidden, layers=layers, heads=heads, vocabulary=50272, positions=2048, tied=True)


def _llama(hidden: int, layers: int, heads: int, mlp: int, *, kv_heads: int | None = None) -> Shape:
    return Shape(
        family="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        vocabulary=32000,
        positions=4096,
    )


def _llama3(hidden: int, layers: int, mlp: int, *, heads: int = 32, tied: bool = False) -> Shape:
    return Shape(
        family="llama",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        mlp=mlp,
        vocabulary=128256,
        positions=8192,
        tied=tied,
    )


SHAPES: dict[str, Shape] = {
    # tokens are bytes; its loss falls visibly within two minutes on two CPU cores
    "tiny": Shape(
        family="llama",
        hidden=192,
        layers=4,
        heads=6,
        mlp=512,
        vocabulary=256,
        positions=1024,
        tied=True,
        sequence=256,
        learning_rate=3e-3,
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-10b": _gpt2(4096, 48, 32),
    "gpt2-15b": _gpt2(8192, 18, 64),
    "gpt2-20b": _gpt2(8192, 24, 64),
    "gpt2-30b": _gpt2(8192, 37, 64),
    "gpt2-40b": _gpt2(8192, 50, 64),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "llama-1b": _llama(2048, 24, 16, 5504),
    "llama-7b": _llama(4096, 32, 32, 14336, kv_heads=8),
    "llama2-13b": _llama(5120, 40, 40, 13824),
    "llama2-34b": _llama(8192, 48, 64, 22016, kv_heads=8),
    "llama3-8b": _llama3(4096, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 28672, heads=64),
    "llama3.2-1b": _llama3(2048, 16, 8192, tied=True),
    "mistral-7b": Shape(
        family="mistral", hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocabulary=32000, positions=32768
    ),
}


def shape_config(shape: Shape) -> Any:
    """The transformers configuration of ``shape``."""
    import transformers

    no_special_tokens = {"bos_token_id": None, "eos_token_id": None}
    if shape.family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=shape.vocabulary,
            n_positions=shape.positions,
            n_embd=shape.hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.mlp,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=shape.tied,
            **no_special_tokens,
        )
    if shape.family == "opt":
        return transformers.OPTConfig(
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.positions,
            hidden_size=shape.hidden,
            word_embed_proj_dim=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            ffn_dim=shape.mlp or 4 * shape.hidden,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
            tie_word_embeddings=shape.tied,
            pad_token_id=None,
            **no_special_tokens,
        )
    llama_like = {
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp or 4 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "tie_word_embeddings": shape.tied,
        "pad_token_id": None,
        **no_special_tokens,
    }
    if shape.family == "mistral":
        # A window of 4096 would make attention build a mask. Later releases dropped the window.
        return transformers.MistralConfig(**llama_like, sliding_window=None)
    assert shape.family == "llama", shape.family
    return transformers.LlamaConfig(**llama_like)
