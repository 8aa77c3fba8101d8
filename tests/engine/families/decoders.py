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

_EXPERTS = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
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
_MAMBA = {**GROUPED, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR = {
    **HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neo": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 16},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, **IDS},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
    "falcon": {**SIZES, "new_decoder_architecture": False, "hidden_dropout": 0.1},
    "xglm": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "ffn_dim": 64,
        "num_layers": 3,
        "attention_heads": 4,
        "max_position_embeddings": 64,
        **IDS,
    },
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
    "cohere2": {**GROUPED, "sliding_window": 8},
    "starcoder2": {**GROUPED, "residual_dropout": 0.1},
    "doge": HEADS,
    "mimo_v2_flash": {**_EXPERTS, "v_head_dim": 8, "sliding_window": 8},
    "diffllama": {**GROUPED, "num_hidden_layers": 2},
    "modernbert-decoder": {**SIZES, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
}
_MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**_LOCAL_EXPERTS, "num_experts_per_tok": 1},  # some experts get no gradient
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _LATENT,
    "gpt_oss": {**_LOCAL_EXPERTS, "head_dim": 8, "sliding_window": 8},
    "phimoe": _LOCAL_EXPERTS,
    "jetmoe": {**GROUPED, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 64},
    "dbrx": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
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
    "recurrent_gemma": {**GROUPED, "lru_width": 32, "attention_window_size": 8},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
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
    "zamba": {
        **SIZES,
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
        "num_key_value_heads": 4,
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
    "nemotron_h": {
        **GROUPED,
        "hybrid_override_pattern": "M*-M",
        "ssm_state_size": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "qwen3_next": {
        **_LINEAR,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_LINEAR, "num_hidden_layers": 4},
    "olmo_hybrid": {**_LINEAR, "num_hidden_layers": 4},
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
