"""Adapters of peft that are more than low-rank matrices beside linear layers: how they train, and what is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import protrain
from tests.engine.harness import (
    FEW_PLANS,
    Loop,
    adamw,
    seeded,
    wrap_under,
)

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
rescale_adapter_scale = pytest.importorskip("peft.helpers").rescale_adapter_scale

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TASK = {"task_type": "CAUSAL_LM"}


def llama(**sizes: Any) -> nn.Module:
    with seeded():
        made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **sizes))
        return made


def mixtral() -> nn.Module:
    with seeded():
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4)
        made: nn.Module = transformers.MixtralForCausalLM(config)
        return made


def adapted(base: nn.Module, config: Any) -> Any:
    with seeded(1):
        made: Any = peft.get_peft_model(base, config)
        return made


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"]} | options, **TASK)


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    made = []
    for seed in range(count):
        tokens = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(seed))
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def head_too() -> Any:
    return lora(modules_to_save=["lm_head"])


def tied_embedding() -> Any:
    return lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)


def prompts() -> Any:
    return peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **TASK)


def shared_buffers() -> Any:
    return peft.VeraConfig(r=4, target_modules=["q_proj"], **TASK)


@pytest.mark.parametrize("config", [head_too, tied_embedding, prompts, shared_buffers])
def test_an_export_is_what_peft_saves(config: Callable[[], Any], tmp_path: Path) -> None:
    tied = config is tied_embedding
    model = adapted(llama(tie_word_embeddings=tied), config())
    model, optimizer = wrap_under(FEW_PLANS[0], model, adamw(model, 0.1), batches()[0], device=CPU)
    Loop().run(model, optimizer, batches())
    protrain.export(model, tmp_path / "export")
    peft.PeftModel.save_pretrained(model, tmp_path / "peft")
    found, expected = (
        peft.PeftModel.from_pretrained(llama(tie_word_embeddings=tied), tmp_path / name).eval()
        for name in ("export", "peft")
    )
    with torch.no_grad():
        trained, read = (each(**batches()[0]) for each in (model.eval(), found))
        assert torch.equal(read.logits, trained.logits)
        assert torch.equal(read.logits, expected(**batches()[0]).logits)
        untrained = adapted(llama(tie_word_embeddings=tied), config()).eval()
        assert not torch.equal(untrained(**batches()[0]).logits, trained.logits)


def test_a_merged_export_has_the_buffers_of_that_module_under_their_own_names(tmp_path: Path) -> None:
    base: Any = llama()
    base.lm_head.register_buffer("seen", torch.arange(3.0))
    model = adapted(base, head_too())
    model, _ = wrap_under(FEW_PLANS[0], model, adamw(model), batches()[0], device=CPU)
    protrain.export(model, tmp_path / "merged", merge=True)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name for name in found if name.endswith("seen")} == {"lm_head.seen"}


def wrapped_around(folder: Path, config: Any) -> Any:
    """A model that is built empty, with an adapter, and takes the weights of its base from ``folder``."""
    base = transformers.AutoConfig.from_pretrained(folder)
    with protrain.empty_parameters():
        model = adapted(transformers.AutoModelForCausalLM.from_config(base), config)
    return wrap_under(FEW_PLANS[0], model, adamw(model), batches()[0], device=CPU, weights=folder)[0]


def base_weights_are(model: nn.Module, expected: nn.Module) -> dict[str, torch.Tensor]:
    """Check that the weights of ``model`` but those of LoRA are those of ``expected``. Returns copies of all."""
    with protrain.full_parameters(model):
        found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in expected.named_parameters():
        if "lora_" not in name:
            assert torch.equal(found[name], parameter), name
    return found


@pytest.mark.parametrize(
    ("whole", "tied"), [("lm_head", False), ("lm_head", True), ("embed_tokens", True), ("mlp", False)]
)
def test_modules_that_are_trained_as_a_whole_begin_as_the_files_say(whole: str, tied: bool, tmp_path: Path) -> None:
    """peft keeps such a module twice, and files have it once."""
    base: Any = llama(tie_word_embeddings=tied)
    config = lora(modules_to_save=[whole])
    base.save_pretrained(tmp_path)
    model, expected = wrapped_around(tmp_path, config), adapted(base, config)
    found = base_weights_are(model, expected)
    expected.load_state_dict(found, strict=False)
    assert torch.equal(model(**batches()[0]).loss, expected(**batches()[0]).loss)
