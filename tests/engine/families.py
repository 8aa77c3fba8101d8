"""Families of models in tiny: how each is built, and which batches it trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from tests.tiny_models import VOCABULARY, tiny_config

IMAGE = 3  # the token that stands for a part of a picture
Batch: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[torch.Generator], Batch]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture in tiny. ``make`` builds equal models for equal states of torch's random generator."""

    name: str
    make: Callable[[], nn.Module]
    draw: Draw

    def batches(self, count: int) -> list[Batch]:
        """Different batches that are the same in every run."""
        generator = torch.Generator().manual_seed(0)
        return [self.draw(generator) for _ in range(count)]


def make_of_transformers(name: str, head: str, settings: dict[str, Any]) -> nn.Module:
    """The tiny model, as the model class or Auto class ``head`` builds it."""
    import transformers

    config, model_class = tiny_config(name, settings), getattr(transformers, head)
    model: nn.Module = model_class.from_config(config) if head.startswith("AutoModel") else model_class(config)
    return model


# -- batches -----------------------------------------------------------------------------------------------------------


def ids(generator: torch.Generator, length: int = 16) -> Tensor:
    """Two sequences of token numbers. The numbers below 10 are left to special tokens."""
    return torch.randint(10, VOCABULARY, (2, length), generator=generator)


def language(generator: torch.Generator) -> Batch:
    """Sequences whose next tokens are to be told."""
    tokens = ids(generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def texts(count: int) -> list[Batch]:
    """Different batches of ``language`` that are the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [language(generator) for _ in range(count)]


def padded(generator: torch.Generator) -> Batch:
    """Sequences of which one is shorter and padded, which takes other paths in attention."""
    mask = (torch.arange(16) < torch.tensor([[16], [11]])).long()
    tokens = ids(generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def pictures(generator: torch.Generator, size: int = 32) -> Batch:
    """Two pictures."""
    return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}


def labelled(g: torch.Generator) -> Batch:
    return {**pictures(g), "labels": torch.randint(2, (2,), generator=g)}


def boxed(g: torch.Generator) -> Batch:
    def boxes(count: int) -> Batch:
        places = torch.rand(count, 4, generator=g) * 0.4 + 0.3
        return {"class_labels": torch.randint(3, (count,), generator=g), "boxes": places}

    return {**pictures(g, 64), "labels": [boxes(2), boxes(3)]}


def shown(g: torch.Generator, *, parts: int = 4) -> Batch:
    """Sequences with places for the parts of one picture each; the loss leaves those out."""
    tokens = ids(g, 24)
    tokens[:, 1 : 1 + parts] = IMAGE
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels, **pictures(g)}


def shown_as_patches(g: torch.Generator) -> Batch:
    batch = shown(g)
    batch["input_ids"][:, 0], batch["input_ids"][:, 5] = 4, 5  # begin and end of the picture
    return {
        **batch,
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 8 * 8, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).long(),
    }


def paired(g: torch.Generator) -> Batch:
    tokens = ids(g)
    tokens[:, -1] = 2
    return {"input_ids": tokens, **pictures(g), "return_loss": True}


def spoken(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=g), "labels": ids(g, 10)}


def waves(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 800, generator=g), "labels": ids(g, 5)}


# -- families of transformers ------------------------------------------------------------------------------------------

RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "layer_type": "basic"}
LLAMA: dict[str, dict[str, Any]] = {"text_config": {"model_type": "llama"}}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 16},
    "bloom": {},
    "falcon": {"new_decoder_architecture": False, "hidden_dropout": 0.1},
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3n_text": {
        **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4},
        "unchecked": {"altup_coef_clip": None},  # with a limit the model writes its weights in forward
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "activation_sparsity_pattern": [0.5, 0.0, 0.0],
    },
    "phi": {"resid_pdrop": 0.1},
}
MIXTURES_AND_RECURRENT: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts_per_tok": 1},  # some experts get no gradient
    "deepseek_v3": {"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gpt_oss": {},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64},
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 8, "head_dim": 16, "n_groups": 1},
    # With rescale_every the model writes its weights when evaluation begins and ends.
    "rwkv": {"attention_hidden_size": 32, "rescale_every": 0},
    "jamba": {
        **{"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False},
        **{"expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_dt_rank": 4},
    },
    "qwen3_next": {"num_hidden_layers": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "minimax": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"embedding_size": 16, "num_hidden_groups": 1, "hidden_dropout_prob": 0.1},
    "deberta-v2": {
        **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "position_buckets": 8},
        **{"conv_kernel_size": 3, "conv_act": "gelu"},
    },
}
SEQUENCE_TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "t5": {"decoder_start_token_id": 0},
    "switch_transformers": {
        **{
            "decoder_start_token_id": 0,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 8,
        }
    },
    "bart": {},
}
CLASSIFIERS: dict[str, dict[str, Any]] = {"vit": {"hidden_dropout_prob": 0.1}, "resnet": {**RESNET, "depths": [2, 2]}}
OTHERS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "deformable_detr": (
        "DeformableDetrForObjectDetection",
        boxed,
        {
            "backbone_config": {"model_type": "resnet", **RESNET, "depths": [1, 1], "out_features": ["stage2"]},
            **{"num_queries": 8, "auxiliary_loss": True, "num_feature_levels": 2, "num_labels": 3},
        },
    ),
    "clip": ("CLIPModel", paired, {}),
    "llava": ("LlavaForConditionalGeneration", partial(shown, parts=16), {**LLAMA, "image_token_index": IMAGE}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        shown_as_patches,
        {
            "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "vision_config": {"window_size": 16, "fullatt_block_indexes": [1]},
            **{"image_token_id": IMAGE, "vision_start_token_id": 4, "vision_end_token_id": 5, "video_token_id": 6},
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        spoken,
        {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "dropout": 0.1},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        waves,
        {
            **{"conv_dim": [16, 16], "conv_kernel": [10, 4], "conv_stride": [5, 4], "layerdrop": 0.0},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0},
        },
    ),
}


def all_families() -> list[Family]:
    of_one_kind: list[tuple[str, Draw, dict[str, dict[str, Any]]]] = [
        ("AutoModelForCausalLM", padded, DECODERS),
        ("AutoModelForCausalLM", language, MIXTURES_AND_RECURRENT),
        ("AutoModelForMaskedLM", padded, ENCODERS),
        ("AutoModelForSeq2SeqLM", padded, SEQUENCE_TO_SEQUENCE),
        ("AutoModelForImageClassification", labelled, CLASSIFIERS),
    ]
    models = {name: (head, draw, own) for head, draw, each in of_one_kind for name, own in each.items()} | OTHERS
    return [
        Family(name=name, make=partial(make_of_transformers, name, head, settings), draw=draw)
        for name, (head, draw, settings) in models.items()
    ]


FAMILIES = {family.name: family for family in all_families()}
