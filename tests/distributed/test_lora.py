"""Several ranks train an adapter, and the first one writes it, alone or merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import protrain
from protrain.checkpoint.adapters import Base
from protrain.cli.trained import adamw
from tests.distributed.pool import import_in_pools, on_ranks

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def wrapped(folder: str, ids: torch.Tensor) -> tuple[Any, Any]:
    config = transformers.AutoConfig.from_pretrained(f"{folder}/source")
    with protrain.empty_parameters():
        model = transformers.LlamaForCausalLM(config)
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"), model)
    return protrain.wrap(
        model,
        adamw(model, 0.1, 0.0),
        example_batch={"input_ids": ids, "labels": ids},
        device="cpu",
        device_memory="1MiB",
        weights=f"{folder}/source",
        progress=False,
    )


def train(rank: int, folder: str) -> None:
    ids = torch.arange(16).view(2, 8) + rank
    model, optimizer = wrapped(folder, ids)
    optimizer.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    base = Base.of(Path(folder) / "source", optimizer.ranks)
    protrain.save_checkpoint(f"{folder}/checkpoints", model, optimizer, base=base)
    protrain.export(model, f"{folder}/adapter")
    protrain.export(model, f"{folder}/merged", merge=True)


@pytest.mark.slow
def test_two_ranks_write_an_adapter_and_what_peft_would_merge(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "source")
    import_in_pools("peft")
    on_ranks(2, train, str(tmp_path))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    changed = set()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        changed |= set() if torch.equal(before[name], value) else {name}
    assert len(changed) == 2 * 7, "every linear layer of both blocks is trained"

    model, optimizer = wrapped(str(tmp_path), torch.arange(16).view(2, 8))
    base_of_one = Base.of(tmp_path / "source", optimizer.ranks)
    protrain.load_checkpoint(tmp_path / "checkpoints", model, optimizer, base=base_of_one)
    protrain.export(model, tmp_path / "loaded")
    name = "adapter_model.safetensors"
    assert (tmp_path / "loaded" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()
