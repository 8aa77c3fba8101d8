"""Families of transformers that see, that see and read, that hear, and that forecast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.engine.families.family import (
    BOTH_SIDES,
    GROUPED,
    IDS,
    SIZES,
    VOCABULARY,
    Batch,
    Draw,
    Family,
    classes,
    ids,
    language,
    pictures,
    transformers_family,
)

PICTURE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_STAGES = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}

_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": {**PICTURE, "hidden_dropout_prob": 0.1},
    "swin": _STAGES,
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
}
_MASKED = {"decoder_num_attention_heads": 4, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 2}
_SWIN = {
    "model_type": "swin",
    **_STAGES,
    "image_size": 64,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_DETECTOR = {
    **BOTH_SIDES,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
    "num_queries": 8,
    "num_labels": 3,
    "auxiliary_loss": True,
}


def _labelled(g: torch.Generator) -> Batch:
    return {"pixel_values": pictures(g), "labels": classes(g)}


def _boxed(g: torch.Generator) -> Batch:
    def boxes(count: int) -> dict[str, Tensor]:
        places = torch.rand(count, 4, generator=g) * 0.4 + 0.3
        return {"class_labels": torch.randint(3, (count,), generator=g), "boxes": places}

    return {"pixel_values": pictures(g, 64), "labels": [boxes(2), boxes(3)]}


def _masked(g: torch.Generator) -> Batch:
    return {
        "pixel_values": pictures(g, 64),
        "mask_labels": [torch.randint(2, (count, 64, 64), generator=g).float() for count in (2, 3)],
        "class_labels": [torch.randint(3, (count,), generator=g) for count in (2, 3)],
    }


def _unlabelled(g: torch.Generator) -> Batch:
    return {"pixel_values": pictures(g)}


_SEEING: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "deformable_detr": ("DeformableDetrForObjectDetection", _boxed, {**_DETECTOR, "num_feature_levels": 2}),
    "mask2former": (
        "Mask2FormerForUniversalSegmentation",
        _masked,
        {
            "backbone_config": _SWIN,
            "feature_size": 32,
            "mask_feature_size": 32,
            "hidden_dim": 32,
            "encoder_feedforward_dim": 64,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "num_attention_heads": 4,
            "dim_feedforward": 64,
            "num_queries": 8,
            "train_num_points": 64,
            "num_labels": 3,
        },
    ),
    "vit_mae": ("ViTMAEForPreTraining", _unlabelled, {**PICTURE, **_MASKED, "decoder_intermediate_size": 32}),
}

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
    "llava": (
        "LlavaForConditionalGeneration",
        _sixteen_parts,
        {
            "text_config": {"model_type": "llama", **GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **PICTURE},
            "image_token_index": _IMAGE,
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
    "blip-2": (
        "Blip2ForConditionalGeneration",
        _four_parts,
        {
            **_QUERIES,
            "text_config": {"model_type": "opt", **SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
        },
    ),
}

_SPEECH = {**SIZES, "layerdrop": 0.0}
_WAVES = {
    **_SPEECH,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 4],
    "conv_stride": [5, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_WRITTEN = {**BOTH_SIDES, **IDS, "vocab_size": VOCABULARY, "decoder_start_token_id": 1}
_SERIES = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    **BOTH_SIDES,
}


def _whisper(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=g), "labels": ids(g, 10)}


def _wave(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 800, generator=g), "labels": ids(g, 5)}


def _forecast(g: torch.Generator) -> Batch:
    past = 10
    return {
        "past_values": torch.randn(2, past, generator=g),
        "past_time_features": torch.randn(2, past, 1, generator=g),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, 4, generator=g),
        "future_time_features": torch.randn(2, 4, 1, generator=g),
    }


_HEARING: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "whisper": (
        "WhisperForConditionalGeneration",
        _whisper,
        {**_WRITTEN, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "dropout": 0.1},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", _wave, _WAVES),
}
_FORECASTERS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "time_series_transformer": ("TimeSeriesTransformerForPrediction", _forecast, _SERIES),
}


def families() -> list[Family]:
    """All of them."""
    classifiers = {
        name: ("AutoModelForImageClassification", _labelled, config) for name, config in _CLASSIFIERS.items()
    }
    models = {**classifiers, **_SEEING, **_MODELS, **_HEARING, **_FORECASTERS}
    return [transformers_family(name, head, draw, **config) for name, (head, draw, config) in models.items()]
