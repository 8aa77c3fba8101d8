"""Families of transformers that hear or forecast: speech, sound, series of numbers, episodes of play."""

from __future__ import annotations

from typing import Any

import torch

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
    transformers_family,
)

_SPEECH = {**SIZES, "layerdrop": 0.0}
_WAVES = {
    **_SPEECH,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 4],
    "conv_stride": [5, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_DECODED = {**BOTH_SIDES, **IDS, "vocab_size": VOCABULARY, "decoder_start_token_id": 1}
_SERIES = {
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    **BOTH_SIDES,
}
_PATCHES = {
    "context_length": 16,
    "prediction_length": 4,
    "num_input_channels": 2,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 32,
}


def _whisper(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=g), "labels": ids(g, 10)}


def _wave(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 800, generator=g), "labels": ids(g, 5)}


def _features(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 32, 16, generator=g), "labels": ids(g, 5)}


def _speech_to_text(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 32, 8, generator=g), "labels": ids(g, 10)}


def _moonshine(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 2400, generator=g), "labels": ids(g, 10)}


def _spectrogram(g: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 32, 16, generator=g), "labels": classes(g)}


def _clap(g: torch.Generator) -> Batch:
    return {
        "input_ids": ids(g),
        "input_features": torch.randn(2, 1, 64, 64, generator=g),
        "is_longer": torch.zeros(2, 1, dtype=torch.bool),
        "return_loss": True,
    }


def _qwen2_audio(g: torch.Generator) -> Batch:
    tokens = ids(g, 24)
    tokens[:, 1:9] = 3
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(tokens == 3, -100),
        "input_features": torch.randn(2, 8, 32, generator=g),
        "feature_attention_mask": torch.ones(2, 32, dtype=torch.long),
    }


def _spoken(g: torch.Generator) -> Batch:
    return {
        "input_ids": ids(g),
        "labels": torch.randn(2, 12, 8, generator=g),
        "speaker_embeddings": torch.randn(2, 16, generator=g),
    }


def _forecast(g: torch.Generator) -> Batch:
    past = 10
    return {
        "past_values": torch.randn(2, past, generator=g),
        "past_time_features": torch.randn(2, past, 1, generator=g),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, 4, generator=g),
        "future_time_features": torch.randn(2, 4, 1, generator=g),
    }


def _channels(g: torch.Generator) -> Batch:
    return {"past_values": torch.randn(2, 16, 2, generator=g), "future_values": torch.randn(2, 4, 2, generator=g)}


_MODELS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "whisper": (
        "WhisperForConditionalGeneration",
        _whisper,
        {**_DECODED, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "dropout": 0.1},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", _wave, _WAVES),
    "wavlm": ("WavLMForCTC", _wave, _WAVES),
    "sew": ("SEWForCTC", _wave, _WAVES),
    "wav2vec2-conformer": ("Wav2Vec2ConformerForCTC", _wave, {**_WAVES, "conv_depthwise_kernel_size": 3}),
    "wav2vec2-bert": (
        "Wav2Vec2BertForCTC",
        _features,
        {**_SPEECH, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3},
    ),
    "speech_to_text": (
        "Speech2TextForConditionalGeneration",
        _speech_to_text,
        {
            **_DECODED,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 32,
            "max_target_positions": 16,
        },
    ),
    "speecht5": (
        "SpeechT5ForTextToSpeech",
        _spoken,
        {
            **SIZES,
            **BOTH_SIDES,
            "num_mel_bins": 8,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speech_decoder_postnet_layers": 2,
            "speaker_embedding_dim": 16,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "max_text_positions": 32,
            "max_speech_positions": 32,
            "use_guided_attention_loss": False,
        },
    ),
    "moonshine": (
        "MoonshineForConditionalGeneration",
        _moonshine,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 1,
            **IDS,
        },
    ),
    "audio-spectrogram-transformer": (
        "ASTForAudioClassification",
        _spectrogram,
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "max_length": 32,
            "num_mel_bins": 16,
        },
    ),
    "clap": (
        "ClapModel",
        _clap,
        {
            "projection_dim": 16,
            "text_config": {**SIZES, "max_position_embeddings": 70, "projection_dim": 16},
            "audio_config": {
                "spec_size": 64,
                "num_mel_bins": 64,
                "patch_size": 4,
                "patch_stride": [4, 4],
                "window_size": 4,
                "depths": [2, 2],
                "num_attention_heads": [2, 4],
                "patch_embeds_hidden_size": 16,
                "hidden_size": 32,
                "projection_dim": 16,
                "enable_fusion": False,
            },
        },
    ),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        _qwen2_audio,
        {
            "audio_token_id": 3,
            "text_config": {"model_type": "qwen2", **GROUPED},
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "num_mel_bins": 8,
                "max_source_positions": 16,
            },
        },
    ),
}
_FORECASTERS: dict[str, tuple[str, Draw, dict[str, Any]]] = {
    "time_series_transformer": ("TimeSeriesTransformerForPrediction", _forecast, _SERIES),
    "autoformer": (
        "AutoformerForPrediction",
        _forecast,
        {**_SERIES, "moving_average": 3, "autocorrelation_factor": 1, "label_length": 4},
    ),
    "patchtst": (
        "PatchTSTForPrediction",
        _channels,
        {**_PATCHES, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 64},
    ),
    "patchtsmixer": ("PatchTSMixerForPrediction", _channels, {**_PATCHES, "num_layers": 3}),
}


def families() -> list[Family]:
    """All of them."""
    return [
        transformers_family(name, head, draw, **config)
        for name, (head, draw, config) in {**_MODELS, **_FORECASTERS}.items()
    ]
