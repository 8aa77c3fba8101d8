"""Families of transformers that write text from the left: decoders, mixtures of experts, recurrent and hybrid ones."""

from __future__ import annotations

from typing import Any

from tests.engine.families.family import (
    GPT,
    GROUPED,
    HEADS,
    IDS,
    SIZES,
    VOCABULARY,
    Family,
    language,
    padded,
    transformers_family,
)

_LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    **GROUPED,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR = {
    **HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, **IDS},
    "falcon": {**SIZES, "new_decoder_architecture": False, "hidden_dropout": 0.1},
    "llama": GROUPED,
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "gemma2": {**HEADS, "sliding_window": 8},
    "gemma3_text": {**HEADS, "sliding_window": 8},
    "gemma3n_text": {
        **HEADS,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "unchecked": {"altup_coef_clip": None},  # with a limit the model writes its weights in forward
        "laurel_rank": 4,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
        "sliding_window": 8,
    },
    "phi": {**SIZES, "resid_pdrop": 0.1},
}
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**_LOCAL_EXPERTS, "num_experts_per_tok": 1},  # some experts get no gradient
    "deepseek_v3": _LATENT,
    "gpt_oss": {**_LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 8},
    "llama4_text": {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 64},
}
_RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3, **IDS},
    "mamba2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "state_size": 8,
        "num_hidden_layers": 3,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
        **IDS,
    },
    "rwkv": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "context_length": 64,
        "rescale_every": 0,  # otherwise the model writes its weights when evaluation begins and ends
        **IDS,
    },
    "jamba": {
        **GROUPED,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        **SIZES,
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "use_mem_rope": True,
    },
    "qwen3_next": {
        **_LINEAR,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "minimax": {**_LOCAL_EXPERTS, "block_size": 8, "layer_types": ["linear_attention", "full_attention"] * 2}
    | {"num_hidden_layers": 4},
}


def families() -> list[Family]:
    """All of them. Decoders are given padding, which takes other paths in attention."""
    groups = (
        (padded, _DECODERS),
        (language, _MIXTURES),
        (language, _RECURRENT),
    )
    return [
        transformers_family(name, "AutoModelForCausalLM", draw, **config)
        for draw, configs in groups
        for name, config in configs.items()
    ]
