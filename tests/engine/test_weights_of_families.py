"""Folders that transformers wrote load into wrapped models, whatever layout a family has in its files."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import protrain
from tests.engine.harness import adamw, assert_same

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    **GROUPED,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SSM = {**GROUPED, "mamba_n_heads": 4, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
ENCODER = {name: value for name, value in SMALL.items() if not name.endswith("token_id")}
BART = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
}

# RWKV is left out: it changes its own weights in forward, which is refused.
CONFIGS: dict[str, dict[str, Any]] = {
    # Files and model have different layouts: experts one by one, other names, or both.
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "dots1": ROUTED,
    "ernie4_5_moe": {
        **GROUPED,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "esm": {
        **ENCODER,
        "mask_token_id": 3,
        "pad_token_id": 1,
        "token_dropout": False,
        "position_embedding_type": "rotary",
    },
    "glm4_moe": {**ROUTED, "head_dim": 8},
    "gpt_neox": SMALL,
    "granitemoe": LOCAL_EXPERTS,
    "granitemoehybrid": {**SSM, **LOCAL_EXPERTS, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_moe": {**HEADS, "num_experts": 4, "moe_topk": 2},
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
    "minimax": LOCAL_EXPERTS,
    "mixtral": LOCAL_EXPERTS,
    "nemotron_h": {
        **GROUPED,
        "hybrid_override_pattern": "M*",
        "ssm_state_size": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "olmoe": EXPERTS,
    "phimoe": LOCAL_EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    # The files hold the model's own layout, most with tied or fused weights.
    "bart": BART,
    "bert": ENCODER,
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gpt2": GPT,
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 8},
    "llama": GROUPED,
    "llama4_text": {**HEADS, "num_local_experts": 2, "intermediate_size_mlp": 64},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
    "mpt": {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64},
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "phi3": GROUPED,
    "t5": {**T5, "decoder_start_token_id": 0},
}
HEAD = dict.fromkeys(("bert", "esm"), "AutoModelForMaskedLM")
HEAD |= dict.fromkeys(("bart", "t5"), "AutoModelForSeq2SeqLM")


@pytest.mark.filterwarnings("error:weights")
@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_that_transformers_wrote_gives_the_model_that_it_reads(family: str, tmp_path: Path) -> None:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {family}")
    kind = getattr(transformers, HEAD.get(family, "AutoModelForCausalLM"))
    torch.manual_seed(5)
    source = kind.from_config(transformers.AutoConfig.for_model(family, **CONFIGS[family]))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter) / 50)  # no two norms and biases are alike
    source.save_pretrained(tmp_path)
    reference = kind.from_pretrained(tmp_path).eval()
    tokens = torch.randint(3, 96, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    with protrain.empty_parameters():
        model = kind.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "progress": False, "chunked_loss": False}
    model, _ = protrain.wrap(model, adamw(model), example_batch=batch, weights=tmp_path, **options)
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    assert_same(dict(model.state_dict()), dict(source.state_dict()))
    # The same operations on the same values, so the loss has the same bits.
    assert model.eval()(**batch).loss.item() == reference(**batch).loss.item()


@pytest.mark.usefixtures("no_profile")
def test_a_tied_head_whose_values_differ_in_the_files_is_an_error(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**GPT)
    tensors = {name: value.clone() for name, value in transformers.GPT2LMHeadModel(config).state_dict().items()}
    tensors["lm_head.weight"] += 1
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with protrain.empty_parameters():
        model: Any = transformers.GPT2LMHeadModel(config)
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    words = r"transformer\.wte\.weight and lm_head\.weight in .* have different values, and both are transformer\.wte"
    with pytest.raises(ValueError, match=rf"weights: {words}.*: where it ties the two, build it so that it does not"):
        protrain.wrap(model, adamw(model), example_batch=batch, weights=tmp_path, device="cpu", progress=False)


def _marian() -> Any:
    return transformers.MarianConfig(
        **BART, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None
    )


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "in memory"])
def test_parameters_that_the_model_computes_are_in_no_file(is_empty: bool, tmp_path: Path) -> None:
    torch.manual_seed(6)
    transformers.MarianMTModel(_marian()).save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.encoder.embed_positions.weight" not in file.keys()  # noqa: SIM118 - it is no mapping
    reference = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    tokens = torch.randint(3, 96, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    with protrain.empty_parameters() if is_empty else nullcontext():
        model: Any = transformers.MarianMTModel(_marian())
    model, _ = protrain.wrap(
        model, adamw(model), example_batch=batch, weights=tmp_path, device="cpu", dtype="float32", progress=False
    )
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    assert model.eval()(**batch).loss.item() == reference(**batch).loss.item()
