"""Families of transformers that see: classes, masks, boxes and depth of pictures, masked pictures, video."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.engine.families.family import (
    BOTH_SIDES,
    SIZES,
    Batch,
    Draw,
    Family,
    classes,
    ids,
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

_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [2, 2],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "decoder_hidden_size": 16,
}

_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": {**PICTURE, "hidden_dropout_prob": 0.1},
    "beit": {**PICTURE, "use_relative_position_bias": True, "drop_path_rate": 0.1, "layer_scale_init_value": 0.1},
    "dinov2": {**PICTURE, "drop_path_rate": 0.1},
    "swin": _STAGES,
    "swinv2": _STAGES,
    "convnext": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.1},
    "convnextv2": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2},
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"},
    "poolformer": {
        "num_encoder_blocks": 2,
        "depths": [2, 2],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
    },
    "mobilenet_v2": {"depth_multiplier": 0.35, "image_size": 32},
    "mobilevit": {
        "image_size": 64,
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
        "num_attention_heads": 4,
    },
    "focalnet": {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "hidden_sizes": [16, 32]},
    "cvt": {
        "embed_dim": [16, 32],
        "depth": [1, 2],
        "num_heads": [2, 4],
        "patch_sizes": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [2, 1],
        "mlp_ratio": [2.0, 2.0],
        "attention_drop_rate": [0.0, 0.0],
        "drop_rate": [0.0, 0.0],
        "drop_path_rate": [0.0, 0.1],
        "qkv_bias": [True, True],
        "cls_token": [False, True],
        "qkv_projection_method": ["dw_bn", "dw_bn"],
        "kernel_qkv": [3, 3],
        "padding_kv": [1, 1],
        "stride_kv": [2, 2],
        "padding_q": [1, 1],
        "stride_q": [1, 1],
    },
}
_FRAMES = {**PICTURE, "num_frames": 4}
_DECODED = {"decoder_num_attention_heads": 4, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 2}
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


def _labelled_large(g: torch.Generator) -> Batch:
    return {"pixel_values": pictures(g, 64), "labels": classes(g)}


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


def _segmented(g: torch.Generator) -> Batch:
    return {"pixel_values": pictures(g), "labels": torch.randint(2, (2, 32, 32), generator=g)}


def _unlabelled(g: torch.Generator) -> Batch:
    return {"pixel_values": pictures(g)}


def _video(g: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32, generator=g), "labels": classes(g)}


def _hidden_video(g: torch.Generator) -> Batch:
    hidden = (torch.arange(32) % 4 > 0).expand(2, -1).clone()
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32, generator=g), "bool_masked_pos": hidden}


def _described(g: torch.Generator) -> Batch:
    return {"pixel_values": pictures(g), "labels": ids(g, 8)}


_OTHERS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "segformer": ("SegformerForSemanticSegmentation", _segmented, _SEGFORMER),
    "dpt": (
        "DPTForSemanticSegmentation",
        _segmented,
        {
            **PICTURE,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 16, 16, 16],
            "fusion_hidden_size": 16,
        },
    ),
    "detr": ("DetrForObjectDetection", _boxed, _DETECTOR),
    "conditional_detr": ("ConditionalDetrForObjectDetection", _boxed, _DETECTOR),
    "deformable_detr": ("DeformableDetrForObjectDetection", _boxed, {**_DETECTOR, "num_feature_levels": 2}),
    "yolos": (
        "YolosForObjectDetection",
        _boxed,
        {**PICTURE, "image_size": [64, 64], "num_detection_tokens": 8, "num_labels": 3},
    ),
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
    "vit_mae": ("ViTMAEForPreTraining", _unlabelled, {**PICTURE, **_DECODED, "decoder_intermediate_size": 32}),
    "videomae": (
        "VideoMAEForPreTraining",
        _hidden_video,
        {**_FRAMES, **_DECODED, "tubelet_size": 2, "decoder_intermediate_size": 32},
    ),
    "timesformer": ("TimesformerForVideoClassification", _video, _FRAMES),
    "vision-encoder-decoder": (
        "VisionEncoderDecoderModel",
        _described,
        {
            "encoder": {"model_type": "vit", **PICTURE},
            "decoder": {"model_type": "bert", **SIZES, "is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
    ),
}


def families() -> list[Family]:
    """All of them."""
    found = [
        transformers_family(
            name,
            "AutoModelForImageClassification",
            _labelled_large if config.get("image_size") == 64 else _labelled,
            **config,
        )
        for name, config in _CLASSIFIERS.items()
    ]
    found += [transformers_family(name, head, draw, **config) for name, (head, draw, config) in _OTHERS.items()]
    return found
