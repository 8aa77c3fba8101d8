"""Small models of transformers."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96
# The sizes of a tiny model. A configuration, and each part of one, gets those of which it has the setting.
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 3),
    **dict.fromkeys(("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "context_length"), 64),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size"), 32),
    **dict.fromkeys(("patch_size", "sliding_window", "chunk_size", "block_size"), 8),
    **{"word_embed_proj_dim": 32, "num_experts_per_tok": 2, "projection_dim": 16},
}
# What the models of ``tiny`` have besides: no dropout, and attention to all that came before.
_PLAIN: dict[str, dict[str, Any]] = {
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "mistral": {"sliding_window": None},
    "opt": {"dropout": 0.0},
    "t5": {"dropout_rate": 0.0, "decoder_start_token_id": 0},
}


def tiny_config(name: str, settings: dict[str, Any]) -> Any:
    """The configuration of a family of transformers with SIZES and ``settings``, in which those of a part are a dict.

    A part of another family than usual has its name as ``model_type``.
    """
    from transformers import AutoConfig

    default = vars(AutoConfig.for_model(name))
    found = {key: size for key, size in SIZES.items() if default.get(key) is not None} | settings
    for key in default.keys() | settings.keys():
        part = settings.get(key, {})
        kind = part.get("model_type") if isinstance(part, dict) else None
        kind = kind or getattr(default.get(key), "model_type", None)
        if kind:
            own = {setting: value for setting, value in part.items() if setting != "model_type"}
            found[key] = tiny_config(kind, own).to_dict()
    unchecked = found.pop("unchecked", {})
    config = AutoConfig.for_model(name, **found)
    vars(config).update(unchecked)
    return config


def tiny(family: str, seed: int = 0, words: int = VOCABULARY, **sizes: Any) -> Any:
    """A llama, mistral, mixtral, cohere, gpt2, opt or t5 in fp32 without dropout, whose values follow from ``seed``."""
    import transformers

    kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    config = tiny_config(family, {"vocab_size": words, **_PLAIN.get(family, {}), **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.from_config(config)
