"""Families of transformers that see and read: pairs, captions, and language models that are shown pictures."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.families.family import (
    GROUPED,
    IDS,
    SIZES,
    T5,
    VOCABULARY,
    Batch,
    Draw,
    Family,
    captioned,
    ids,
    language,
    pictures,
    transformers_family,
)
from tests.engine.families.vision import PICTURE

_IMAGE = 3  # the token that stands for a part of a picture


def _shown(g: torch.Generator, count: int) -> Batch:
    """Sequences with ``count`` places for the parts of one picture each; the loss leaves those out."""
    tokens = ids(g, 24)
    tokens[:, 1 : 1 + count] = _IMAGE
    labels = tokens.masked_fill(tokens == _IMAGE, -100)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _sixteen_parts(g: torch.Generator) -> Batch:
    return {**_shown(g, 16), "pixel_values": pictures(g)}


def _four_parts(g: torch.Generator) -> Batch:
    return {**_shown(g, 4), "pixel_values": pictures(g)}


def _lists_of_pictures(g: torch.Generator) -> Batch:
    return {**_shown(g, 4), "pixel_values": pictures(g)[:, None]}


def _idefics(g: torch.Generator) -> Batch:
    seen = torch.ones(2, 16, 1, dtype=torch.long)
    return {
        **language(g),
        "attention_mask": seen[:, :, 0],
        "pixel_values": pictures(g)[:, None],
        "image_attention_mask": seen,
    }


def _paligemma(g: torch.Generator) -> Batch:
    return {**_sixteen_parts(g), "token_type_ids": (torch.arange(24) >= 20).long().expand(2, -1).clone()}


def _gemma3(g: torch.Generator) -> Batch:
    batch = _four_parts(g)
    return {**batch, "token_type_ids": (batch["input_ids"] == _IMAGE).long()}


def _qwen(g: torch.Generator) -> Batch:
    batch = _shown(g, 4)
    batch["input_ids"][:, 0], batch["input_ids"][:, 5] = 4, 5  # begin and end of the picture
    return {
        **batch,
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 8 * 8, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (batch["input_ids"] == _IMAGE).long(),
    }


def _mllama(g: torch.Generator) -> Batch:
    one = torch.ones(2, 1, dtype=torch.long)
    return {
        **language(g),
        "pixel_values": pictures(g)[:, None, None],
        "aspect_ratio_ids": one,
        "aspect_ratio_mask": one[:, :, None],
        "cross_attention_mask": torch.ones(2, 16, 1, 1, dtype=torch.long),
    }


def _pairs(g: torch.Generator) -> Batch:
    tokens = ids(g)
    tokens[:, -1] = 2
    return {"input_ids": tokens, "pixel_values": pictures(g), "return_loss": True}


def _instructed(g: torch.Generator) -> Batch:
    return {**_four_parts(g), "qformer_input_ids": ids(g, 8)}


def _kosmos(g: torch.Generator) -> Batch:
    places = torch.zeros(2, 16, dtype=torch.long)
    places[:, 1:5] = 1
    return {**captioned(g), "image_embeds_position_mask": places}


def _asked(g: torch.Generator) -> Batch:
    return {"input_ids": ids(g), "pixel_values": pictures(g), "labels": torch.rand(2, 2, generator=g)}


def _flattened(g: torch.Generator) -> Batch:
    places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(4), indexing="ij"), -1).view(1, 8, 2) + 1
    patches = torch.cat([places.expand(2, -1, -1).float(), torch.randn(2, 8, 192, generator=g)], -1)
    return {"flattened_patches": patches, "attention_mask": torch.ones(2, 8), "labels": ids(g, 8)}


_PAIR = {"text_config": SIZES, "vision_config": PICTURE, "projection_dim": 16}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_QWEN_TOKENS = {"image_token_id": _IMAGE, "vision_start_token_id": 4, "vision_end_token_id": 5, "video_token_id": 6}
_QWEN_TEXT = {**GROUPED, "rope_parameters": _ROPE}

_QUERIES = {
    "vision_config": PICTURE,
    "qformer_config": {**SIZES, "num_hidden_layers": 2, "encoder_hidden_size": 32, "cross_attention_frequency": 1},
    "num_query_tokens": 4,
    "image_token_index": _IMAGE,
}

_MODELS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "clip": ("CLIPModel", _pairs, _PAIR),
    "siglip": ("SiglipModel", _pairs, {"text_config": SIZES, "vision_config": PICTURE}),
    "blip": (
        "BlipForConditionalGeneration",
        captioned,
        {**_PAIR, "text_config": {**SIZES, "encoder_hidden_size": 32, "is_decoder": True}},
    ),
    "git": ("GitForCausalLM", captioned, {**SIZES, "vision_config": PICTURE}),
    "llava": (
        "LlavaForConditionalGeneration",
        _sixteen_parts,
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **PICTURE},
            "image_token_index": _IMAGE,
        },
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        _paligemma,
        {
            "text_config": {"model_type": "gemma", **GROUPED, "head_dim": 8},
            "vision_config": {"model_type": "siglip_vision_model", **PICTURE},
            "image_token_index": _IMAGE,
            "projection_dim": 32,
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        _gemma3,
        {
            "text_config": {**GROUPED, "head_dim": 8, "sliding_window": 8},
            "vision_config": {"model_type": "siglip_vision_model", **PICTURE},
            "image_token_index": _IMAGE,
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        _qwen,
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 32},
            **_QWEN_TOKENS,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        _qwen,
        {
            "text_config": _QWEN_TEXT,
            "vision_config": {
                **_QWEN_VISION,
                "out_hidden_size": 32,
                "intermediate_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **_QWEN_TOKENS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        _qwen,
        {
            "text_config": {**_QWEN_TEXT, "head_dim": 8},
            "vision_config": {
                **_QWEN_VISION,
                "out_hidden_size": 32,
                "intermediate_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            **_QWEN_TOKENS,
        },
    ),
    "idefics": (
        "IdeficsForVisionText2Text",
        _idefics,
        {
            **SIZES,
            "additional_vocab_size": 0,
            "cross_layer_interval": 1,
            "vision_config": {**PICTURE, "embed_dim": 32},
            "perceiver_config": {
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "resampler_n_latents": 4,
            },
            "use_resampler": True,
        },
    ),
    "idefics2": (
        "Idefics2ForConditionalGeneration",
        _lists_of_pictures,
        {
            "text_config": {"model_type": "mistral", **GROUPED},
            "vision_config": PICTURE,
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 2,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
            "image_token_id": _IMAGE,
        },
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        _lists_of_pictures,
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": PICTURE,
            "scale_factor": 2,
            "image_token_id": _IMAGE,
        },
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        _mllama,
        {
            "text_config": {**GROUPED, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            "vision_config": {
                "hidden_size": 32,
                "attention_heads": 4,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "intermediate_size": 64,
                "image_size": 32,
                "patch_size": 8,
                "max_num_tiles": 1,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 96,
                "supported_aspect_ratios": [[1, 1]],
            },
        },
    ),
    "vilt": (
        "ViltForQuestionAnswering",
        _asked,
        {**PICTURE, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_labels": 2},
    ),
    "blip-2": (
        "Blip2ForConditionalGeneration",
        _four_parts,
        {
            **_QUERIES,
            "text_config": {"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
        },
    ),
    "instructblip": (
        "InstructBlipForConditionalGeneration",
        _instructed,
        {**_QUERIES, "text_config": {"model_type": "t5", **T5}},
    ),
    "kosmos-2": (
        "Kosmos2ForConditionalGeneration",
        _kosmos,
        {
            "text_config": {
                "vocab_size": VOCABULARY,
                "embed_dim": 32,
                "layers": 2,
                "ffn_dim": 64,
                "attention_heads": 4,
                "max_position_embeddings": 64,
                **IDS,
            },
            "vision_config": PICTURE,
            "latent_query_num": 4,
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        _four_parts,
        {
            "text_config": {"model_type": "qwen2", **GROUPED},
            "vision_config": {**PICTURE, "image_size": [32, 32], "patch_size": [8, 8]},
            "image_token_id": _IMAGE,
            "downsample_ratio": 0.5,
        },
    ),
    "pix2struct": (
        "Pix2StructForConditionalGeneration",
        _flattened,
        {
            "text_config": {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
            },
            "vision_config": {
                "hidden_size": 32,
                "patch_embed_hidden_size": 192,
                "d_ff": 64,
                "d_kv": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "seq_len": 16,
            },
        },
    ),
}


def families() -> list[Family]:
    """All of them."""
    return [transformers_family(name, head, draw, **config) for name, (head, draw, config) in _MODELS.items()]
