"""Families of transformers that read text: encoders, and encoders with decoders."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.families.family import (
    GPT,
    IDS,
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
    "roberta": {**SIZES, "max_position_embeddings": 70},
    "albert": {**SIZES, "embedding_size": 16, "num_hidden_groups": 1, "hidden_dropout_prob": 0.1},
    "distilbert": {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4},
    "mobilebert": {**SIZES, "embedding_size": 16, "intra_bottleneck_size": 16},
    "deberta": {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        **SIZES,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "share_att_key": True,
        "position_buckets": 8,
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
    "modernbert": {**SIZES, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    "longformer": {**SIZES, "max_position_embeddings": 70, "attention_window": [8, 8, 8]},
    "big_bird": {**SIZES, "attention_type": "original_full"},
    "nystromformer": {**SIZES, "num_landmarks": 16, "segment_means_seq_len": 16, "conv_kernel_size": 3},
    "fnet": {**SIZES, "tpu_short_seq_length": 16},
    "funnel": {
        "vocab_size": VOCABULARY,
        "block_sizes": [1, 1],
        "num_decoder_layers": 1,
        "d_model": 32,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 64,
    },
    "mpnet": SIZES,
    "esm": {**SIZES, "mask_token_id": 3, "position_embedding_type": "rotary"},
    "convbert": {**SIZES, "embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3},
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
    "longt5": {**T5, "encoder_attention_type": "transient-global", "local_radius": 3, "global_block_size": 4},
    "switch_transformers": {
        **T5,
        "num_experts": 4,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 8,
    },
    "bart": SEQUENCES,
    "pegasus": SEQUENCES,
    "marian": SEQUENCES,
    "nllb-moe": {
        **SEQUENCES,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "num_experts": 2,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "expert_capacity": 8,
    },
    "led": {
        **SEQUENCES,
        "attention_window": [8, 8],
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "prophetnet": {
        **IDS,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 1,
        "ngram": 2,
        "num_buckets": 8,
    },
}


def _spans(g: torch.Generator) -> Batch:
    return {"input_ids": ids(g), "start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([4, 6])}


def _boxed(g: torch.Generator) -> Batch:
    box = torch.tensor([1, 2, 10, 12]).expand(2, 16, 4).clone()
    return {"input_ids": ids(g), "bbox": box, "labels": torch.randint(2, (2, 16), generator=g)}


def _pairs(g: torch.Generator) -> Batch:
    return {"input_ids": ids(g), "labels": ids(g, 8)}


_OTHERS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "xlnet": (
        "XLNetForQuestionAnsweringSimple",
        _spans,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64},
    ),
    "layoutlmv3": (
        "LayoutLMv3ForTokenClassification",
        _boxed,
        {
            **SIZES,
            "visual_embed": False,
            "coordinate_size": 6,
            "shape_size": 4,
            "max_2d_position_embeddings": 32,
            "has_relative_attention_bias": True,
            "has_spatial_attention_bias": True,
            "max_position_embeddings": 70,
        },
    ),
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
    "seamless_m4t": (
        "SeamlessM4TForTextToText",
        _pairs,
        {
            **SIZES,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "speech_encoder_layers": 1,
            "t2u_encoder_layers": 1,
            "t2u_decoder_layers": 1,
            "decoder_start_token_id": 1,
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
