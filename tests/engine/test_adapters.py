"""Adapters of peft that are more than low-rank matrices beside linear layers: how they train, and what is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from tests.engine.families import make_of_transformers, texts
from tests.engine.harness import FEW_PLANS, Loop, adamw, seeded, wrap_under

peft = pytest.importorskip("peft")
rescale_adapter_scale = pytest.importorskip("peft.helpers").rescale_adapter_scale

TASK = {"task_type": "CAUSAL_LM"}
BATCHES = texts(4)


def llama(**sizes: Any) -> nn.Module:
    with seeded():
        return make_of_transformers("llama", "LlamaForCausalLM", sizes)


def adapted(base: nn.Module, config: Any) -> Any:
    with seeded(1):
        made: Any = peft.get_peft_model(base, config)
        return made


def lora(**options: Any) -> Any:
    return peft.LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"]} | options, **TASK)


CONFIGS: dict[str, Callable[[], Any]] = {
    "tied embedding": lambda: lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "prompts": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **TASK),
    "shared buffers": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], **TASK),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_export_is_what_peft_saves(kind: str, tmp_path: Path) -> None:
    config, tied = CONFIGS[kind], kind == "tied embedding"
    model = adapted(llama(tie_word_embeddings=tied), config())
    model, optimizer = wrap_under(FEW_PLANS[0], model, adamw(model, 0.1), BATCHES[0])
    Loop().run(model, optimizer, BATCHES)
    protrain.export(model, tmp_path / "export")
    peft.PeftModel.save_pretrained(model, tmp_path / "peft")
    found, expected = (
        peft.PeftModel.from_pretrained(llama(tie_word_embeddings=tied), tmp_path / name).eval()
        for name in ("export", "peft")
    )
    with torch.no_grad():
        trained, read = (each(**BATCHES[0]) for each in (model.eval(), found))
        assert torch.equal(read.logits, trained.logits)
        assert torch.equal(read.logits, expected(**BATCHES[0]).logits)
        untrained = adapted(llama(tie_word_embeddings=tied), config()).eval()
        assert not torch.equal(untrained(**BATCHES[0]).logits, trained.logits)
