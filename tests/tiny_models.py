"""Small models of transformers, without dropout."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_OF_FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "mistral": ("MistralConfig", {**LLAMA, "sliding_window": None}),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_local_experts": 4}),
    "cohere": ("CohereConfig", LLAMA),
    "gpt2": (
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
            **{"bos_token_id": None, "eos_token_id": None, **_NO_DROPOUT},
        },
    ),
    "opt": (
        "OPTConfig",
        {
            **{"vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64},
            **{"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0},
            **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2},
        },
    ),
    "t5": (
        "T5Config",
        {
            **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
            **{"num_decoder_layers": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
    ),
}


def config_of(family: str, **sizes: Any) -> Any:
    """The configuration of a model of ``family``, with other ``sizes`` than the usual ones."""
    import transformers

    kind, usual = _OF_FAMILY[family]
    return getattr(transformers, kind)(**{**usual, **sizes})


def tiny(family: str, seed: int = 0, words: int = VOCABULARY, **sizes: Any) -> Any:
    """A llama, mistral, mixtral, cohere, gpt2, opt or t5 in fp32, whose values follow from ``seed``."""
    import transformers

    kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(config_of(family, vocab_size=words, **sizes))
