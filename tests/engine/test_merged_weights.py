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
from tests.engine.families import make_of_transformers
from tests.engine.harness import Spec, adamw, assert_same, seeded, wrap_under
from tests.engine.plain_loop import rounded
from tests.engine.test_materialise import rewrite

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

EXPERTS = 4
EXPERT = "model.layers.1.block_sparse_moe.experts.2"  # as files call it
LOOSE, TIGHT = Spec("all", "all", "n"), Spec("none", "least", "cs", small=True)


def mixtral() -> Any:
    with seeded():
        return make_of_transformers("mixtral", "MixtralForCausalLM", {"num_hidden_layers": 2})


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """A Mixtral whose weights are in the folder of the test."""
    model = mixtral()
    model.save_pretrained(tmp_path)
    stored = safetensors_torch.load_file(tmp_path / "model.safetensors")
    assert {f"{EXPERT}.{name}.weight" for name in ("w1", "w2", "w3")} < stored.keys(), "the layout of the Hub"
    assert not any("gate_up_proj" in key for key in stored)
    return model


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def empty(make: Callable[[], Any] = mixtral) -> Any:
    with protrain.empty_parameters():
        return make()


def wrap(model: nn.Module, folder: Path, **options: Any) -> Any:
    options = {"example_batch": batch(), "dtype": "float32", **options}
    return protrain.wrap(model, adamw(model), weights=folder, device="cpu", progress=False, **options)


@pytest.mark.parametrize(("spec", "dtype"), [(LOOSE, torch.float32), (TIGHT, torch.bfloat16)], ids=["loose", "tight"])
def test_experts_that_are_spread_over_files_are_read(
    spec: Spec, dtype: torch.dtype, source: Any, tmp_path: Path
) -> None:
    sharded = tmp_path / "sharded"
    source.save_pretrained(sharded, max_shard_size="40KB")
    files = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({file for key, file in files.items() if ".layers.1.block_sparse_moe.experts." in key}) > 1
    model = empty()
    model, optimizer = wrap_under(spec, model, adamw(model), batch(), dtype=dtype, tight=spec is TIGHT, weights=sharded)
    for name, value in source.named_parameters():
        assert torch.equal(optimizer.export_parameter(name)["master"], value), name
    expected = {name: rounded(value.detach(), dtype) for name, value in source.state_dict().items()}
    assert_same(dict(model.state_dict()), expected)


def _without(*ends: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if ".layers.1." in key and key.endswith(ends)]:
            del tensors[key]

    return change


def _with(key: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({key: value})


OTHERS = r"experts\.0\.w[12]\.weight and {} more in model\.safetensors"
NOT_MERGED = r" do not make model\.layers\.1\.mlp\.experts\.gate_up_proj, as transformers"


@pytest.mark.usefixtures("no_profile", "source")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without("2.w1.weight", "2.w2.weight", "2.w3.weight"), OTHERS.format(5) + r".* has shape \(3, 128, 32\)"),
        (_without("experts.2.w1.weight"), OTHERS.format(6) + NOT_MERGED),
        (_with(f"{EXPERT}.w1.weight", torch.zeros(64, 31)), OTHERS.format(7) + NOT_MERGED),
        (_without("w2.weight"), r"lacks 1 of \d+ parameters, among them model\.layers\.1\.mlp\.experts\.down_proj"),
        (
            _with(f"{EXPERT}.w1.weight", torch.zeros(64, 32).to(torch.float8_e4m3fn)),
            r"experts\.2\.w1\.weight in model\.safetensors is F8_E4M3: quantized weights cannot be trained",
        ),
        (
            _with("model.layers.1.block_sparse_moe.gate.weight", torch.zeros(EXPERTS, 31)),
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
    model, _ = wrap(empty(build), tmp_path, example_batch=(torch.randn(2, 8),))
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
    llama = make_of_transformers("llama", "LlamaForCausalLM", {})
    safetensors_torch.save_file(llama.state_dict(), tmp_path / "model.safetensors")
    model, _ = wrap(empty(lambda: type(llama)(llama.config)), tmp_path)
    assert_same(dict(model.state_dict()), dict(llama.state_dict()))
