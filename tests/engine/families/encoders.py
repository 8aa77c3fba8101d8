"""Families of transformers that read text: encoders, and encoders with decoders."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.families.family import (
    GPT,
    SEQUENCES,
    SIZES,
    T5,
    VOCABULARY,
    Batch,
    Draw,
    Family,
    ids,
    padded,
    transformers_family,
)

_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "albert": {**SIZES, "embedding_size": 16, "num_hidden_groups": 1, "hidden_dropout_prob": 0.1},
    "deberta-v2": {
        **SIZES,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "share_att_key": True,
        "position_buckets": 8,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
    "longformer": {**SIZES, "max_position_embeddings": 70, "attention_window": [8, 8, 8]},
    "perceiver": {
        "vocab_size": VOCABULARY,
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "max_position_embeddings": 16,
    },
}
_SEQUENCE_TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "t5": T5,
    "switch_transformers": {
        **T5,
        "num_experts": 4,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 8,
    },
    "bart": SEQUENCES,
}


def _pairs(g: torch.Generator) -> Batch:
    return {"input_ids": ids(g), "labels": ids(g, 8)}


_OTHERS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "encoder-decoder": (
        "EncoderDecoderModel",
        _pairs,
        {
            "encoder": {"model_type": "bert", **SIZES},
            "decoder": {"model_type": "gpt2", **GPT, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
    ),
}


def families() -> list[Family]:
    """All of them."""
    groups = (
        ("AutoModelForMaskedLM", _ENCODERS),
        ("AutoModelForSeq2SeqLM", _SEQUENCE_TO_SEQUENCE),
    )
    found = [
        transformers_family(name, head, padded, **config)
        for head, configs in groups
        for name, config in configs.items()
    ]
    found += [transformers_family(name, head, draw, **config) for name, (head, draw, config) in _OTHERS.items()]
    return found
