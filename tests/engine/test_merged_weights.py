"""Folders in which each expert has matrices of its own, and models that have one tensor for all experts of a layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.engine.harness import CKPT, NONE, SWAP, Loop, Spec, adamw, assert_same, wrap_under
from tests.engine.plain_loop import prepare_plain, rounded

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

EXPERTS = 4
EXPERT = "model.layers.1.block_sparse_moe.experts.2"  # as files call it
LOOSE, TIGHT = Spec("all", "all", (NONE,)), Spec("none", "least", (CKPT, SWAP), small=True)
CPU = torch.device("cpu")


def config(**options: Any) -> Any:
    return transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        **options,
    )


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """A Mixtral whose weights are in the folder of the test."""
    torch.manual_seed(3)
    model = transformers.MixtralForCausalLM(config())
    model.save_pretrained(tmp_path)
    stored = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert {f"{EXPERT}.{name}.weight" for name in ("w1", "w2", "w3")} < stored.keys(), "the layout of the Hub"
    assert not any("gate_up_proj" in key for key in stored)
    return model


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def empty(kind: str = "MixtralForCausalLM", **options: Any) -> Any:
    with protrain.empty_parameters():
        return getattr(transformers, kind)(config(**options))


def wrap(model: nn.Module, folder: Path, **options: Any) -> Any:
    options = {"example_batch": batch(), "dtype": "float32", **options}
    return protrain.wrap(model, adamw(model), weights=folder, device="cpu", progress=False, **options)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    change(tensors)
    safetensors_torch.save_file(tensors, file)


@pytest.mark.parametrize(("spec", "dtype"), [(LOOSE, torch.float32), (TIGHT, torch.bfloat16)], ids=["loose", "tight"])
def test_experts_that_are_spread_over_files_train_as_in_the_plain_loop(
    spec: Spec, dtype: torch.dtype, source: Any, tmp_path: Path
) -> None:
    sharded = tmp_path / "sharded"
    source.save_pretrained(sharded, max_shard_size="40KB")
    files = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({file for key, file in files.items() if ".layers.1.block_sparse_moe.experts." in key}) > 1
    plain = transformers.MixtralForCausalLM.from_pretrained(sharded)
    model, optimizer = wrap_under(
        spec, model := empty(), adamw(model), batch(), device=CPU, dtype=dtype, tight=spec is TIGHT, weights=sharded
    )
    for name, value in source.named_parameters():
        assert torch.equal(optimizer.export_parameter(name)["master"], value), name
    expected = {name: rounded(value.detach(), dtype) for name, value in source.state_dict().items()}
    assert_same(dict(model.state_dict()), expected)
    plain, reference = prepare_plain(plain, adamw(plain), device=CPU, dtype=dtype)
    assert Loop().run(model, optimizer, [batch()] * 2) == Loop().run(plain, reference, [batch()] * 2)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def _lost(tensors: dict[str, Tensor]) -> None:
    for name in ("w1", "w2", "w3"):
        del tensors[f"{EXPERT}.{name}.weight"]


def _half_lost(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERT}.w1.weight"]


def _none(tensors: dict[str, Tensor]) -> None:
    for key in [key for key in tensors if ".layers.1." in key and ".w2." in key]:
        del tensors[key]


def _other_shape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERT}.w1.weight"] = torch.zeros(64, 31)


def _quantized(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERT}.w1.weight"] = tensors[f"{EXPERT}.w1.weight"].to(torch.float8_e4m3fn)


def _renamed_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.block_sparse_moe.gate.weight"] = torch.zeros(EXPERTS, 31)


MERGED = r"model\.layers\.1\.block_sparse_moe\.experts\.0\.w[12]\.weight and {} more in model\.safetensors"


@pytest.mark.usefixtures("no_profile", "source")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_lost, MERGED.format(5) + r", which is .*\.gate_up_proj in the model, has shape \(3, 128, 32\), .* \(4, 128,"),
        (_half_lost, MERGED.format(6) + r" do not make model\.layers\.1\.mlp\.experts\.gate_up_proj, as transformers"),
        (_other_shape, MERGED.format(7) + r" do not make model\.layers\.1\.mlp\.experts\.gate_up_proj, as transformer"),
        (_none, r"lacks 1 of \d+ parameters, among them model\.layers\.1\.mlp\.experts\.down_proj"),
        (_quantized, r"experts\.2\.w1\.weight in model\.safetensors is F8_E4M3: quantized weights cannot be trained"),
        (
            _renamed_shape,
            r"model\.layers\.1\.block_sparse_moe\.gate\.weight in .*, which is model\.layers\.1\.mlp\.gate\.weight in "
            r"the model, has shape \(4, 31\), the model's is \(4, 32\)",
        ),
    ],
)
def test_damaged_experts_are_named_before_anything_is_loaded(
    damage: Callable[[dict[str, Tensor]], None], words: str, tmp_path: Path
) -> None:
    rewrite(tmp_path, damage)
    with pytest.raises(ValueError, match=f"weights: .*{words}"):
        wrap(model := empty(), tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_of_no_library_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    torch.manual_seed(2)
    source = build()
    safetensors_torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    with protrain.empty_parameters():
        model = build()
    model, _ = wrap(model, tmp_path, example_batch=(torch.randn(2, 8),))
    assert_same(dict(model.state_dict()), dict(source.state_dict()))


@pytest.mark.usefixtures("source")
def test_a_transformers_without_these_rules_reads_what_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("transformers.core_model_loading.rename_source_key")
    with pytest.raises(
        ValueError, match=r"lacks \d+ of \d+ parameters, among them model\.layers\.0\.mlp\.gate\.weight"
    ):
        wrap(empty(), tmp_path)
    torch.manual_seed(4)
    llama = transformers.LlamaForCausalLM(
        small := transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    )
    safetensors_torch.save_file(llama.state_dict(), tmp_path / "model.safetensors")
    with protrain.empty_parameters():
        model = transformers.LlamaForCausalLM(small)
    model, _ = wrap(model, tmp_path)
    assert_same(dict(model.state_dict()), dict(llama.state_dict()))
