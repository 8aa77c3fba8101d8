"""Models without memory of their own: given their start values, or filled from safetensors, straight into chunks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.engine import families, residual
from tests.engine.harness import Batch, Spec, adamw, assert_same, seeded, wrap_under
from tests.engine.plain_loop import rounded

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

# Mixtral has one tensor for all experts of a layer, and its files have matrices of each.
EXPERT = "model.layers.1.block_sparse_moe.experts.2"  # as files call it
SPECS = (Spec("none", "least", "c"), Spec("some", "middle", "n", small=True), Spec("all", "least", "n"))
WIDTH, LAYERS = 48, 4


def gpt2() -> Any:
    return families.make_of_transformers("gpt2", "GPT2LMHeadModel", {"n_embd": WIDTH, "n_layer": LAYERS})


def mixtral() -> Any:
    with seeded():
        return families.make_of_transformers("mixtral", "MixtralForCausalLM", {"num_hidden_layers": 2})


def empty(make: Callable[[], Any] = gpt2) -> Any:
    with protrain.empty_parameters():
        model = make()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    return model


@pytest.fixture
def wrapped(batch: Batch, device: torch.device) -> Callable[..., Any]:
    def wrap(model: Any, spec: Spec = SPECS[0], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        return wrap_under(spec, model, adamw(model), batch, device=device, dtype=dtype, **options)

    return wrap


def test_initialisation_follows_the_models_own_rule(wrapped: Callable[..., Any]) -> None:
    model, _ = wrapped(empty())
    found = model.state_dict()
    deviations = {"transformer.wte": 0.02, "transformer.h.0.mlp.c_proj": 0.02 / (2 * LAYERS) ** 0.5}
    for name, deviation in deviations.items():
        assert found[f"{name}.weight"].std().item() == pytest.approx(deviation, rel=0.08)
    assert (found["transformer.ln_f.weight"] == 1).all()
    assert not found["transformer.h.0.mlp.c_proj.bias"].any()
    assert len({value.flatten()[0].item() for value in found.values() if value.std() > 0}) > LAYERS  # not all alike
    assert model.lm_head.weight is model.transformer.wte.weight


# -- weights= ----------------------------------------------------------------------------------------------------------


def saved(folder: Path, make: Callable[[], Any] = gpt2, *, shards: bool = False, prefix: bool = True) -> Any:
    """A model whose weights are in ``folder``; ``prefix=False`` saves the base model alone, as GPT-2 is published."""
    model = make()
    (model if prefix else model.base_model).save_pretrained(folder, max_shard_size="40KB" if shards else "5GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == shards
    return model


@pytest.mark.parametrize(
    ("make", "prefix", "shards", "dtype"),
    [(gpt2, True, False, torch.float32), (gpt2, False, True, torch.float16), (mixtral, True, True, torch.bfloat16)],
)
def test_weights_are_those_of_the_files(
    make: Callable[[], Any], prefix: bool, shards: bool, dtype: torch.dtype, tmp_path: Path, wrapped: Callable[..., Any]
) -> None:
    """Files in several parts, over which the experts of a layer are spread, go into offloaded chunks."""
    reference = saved(tmp_path, make, shards=shards, prefix=prefix)
    model, optimizer = wrapped(empty(make), SPECS[0 if shards else 1], dtype, weights=tmp_path)
    found = model.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.equal(found[name].cpu(), rounded(value, dtype)), name
    for name, parameter in reference.named_parameters():
        assert torch.equal(optimizer.export_parameter(name)["master"], parameter.detach()), name


@pytest.mark.parametrize("name", ["some-org/some-model", "no-org/no-model"])
def test_weights_of_the_hub(
    name: str, tmp_path: Path, wrapped: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--some-org--some-model"
    reference = saved(model / "snapshots" / "newest", shards=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("newest")
    if name == "no-org/no-model":
        with pytest.raises(ValueError, match="the Hugging Face Hub does not give a model 'no-org/no-model': "):
            wrapped(empty(), weights=name)
        return
    trained, _ = wrapped(empty(), weights=name)
    assert_same({k: v.cpu() for k, v in trained.state_dict().items()}, dict(reference.state_dict()))


def test_what_the_model_has_no_place_for_is_named_once(tmp_path: Path, wrapped: Callable[..., Any]) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({f"score.{n}": torch.zeros(2) for n in range(5)}))
    with pytest.warns(UserWarning, match="no place for") as caught:
        wrapped(empty(), weights=tmp_path)
    assert len(caught) == 1
    words = "holds what GPT2LMHeadModel has no place for: score.0, score.1, score.2 and 2 more. Left out"
    assert words in str(caught[0].message)


@pytest.mark.filterwarnings("error:weights")
@pytest.mark.parametrize(
    "more",
    [
        "transformer.h.0.attn.bias",  # of which the model itself says that it may be there
        "h.1.self_attn.rotary_emb.inv_freq",
        "lm_head.weight",  # tied: a second name of the embedding
    ],
)
def test_nothing_is_said_of_what_the_model_does_without(more: str, tmp_path: Path, wrapped: Callable[..., Any]) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.setdefault(more, tensors["transformer.wte.weight"].clone()))
    wrapped(empty(), weights=tmp_path)


@pytest.mark.filterwarnings("error:weights")
def test_persistent_buffers_and_whole_numbers_come_with_the_weights(tmp_path: Path, device: torch.device) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)))
        model.register_parameter("table", nn.Parameter(torch.arange(4), requires_grad=False))
        model.register_buffer("passing", torch.zeros(3), persistent=False)
        return model

    source: Any = build()
    source[1][1].running_mean += 3
    source.table.data += 5
    held = {**source.state_dict(), "passing": torch.ones(7)}  # of another size than the model makes it: not its own
    safetensors_torch.save_file(held, tmp_path / "model.safetensors")
    with protrain.empty_parameters():
        model = build()
    batch = (torch.randn(4, 8),)
    wrapped, _ = wrap_under(SPECS[0], model, adamw(model), batch, device=device, weights=tmp_path)
    assert_same({k: v.cpu() for k, v in wrapped.state_dict().items()}, source.state_dict())
    source[1][1].running_mean = torch.zeros(5)
    safetensors_torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights: 1\.1\.running_mean in .* has shape \(5,\), the model's is \(8,\)"):
        wrap_under(SPECS[0], model := build(), adamw(model), batch, device=device, weights=tmp_path)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "ctrl-c"])
def test_a_model_whose_wrap_failed_halfway_is_not_taken_for_one(
    error: BaseException, batch: Batch, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = saved(tmp_path)
    model: Any = type(reference).from_pretrained(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("protrain.engine.build.BufferPool", fail)
        with pytest.raises(type(error)):
            wrap_under(SPECS[0], model, adamw(model), batch, device=device)
    with pytest.raises(ValueError, match=r"gone, transformer\.wte\.weight among them: an earlier .* or pass weights="):
        protrain.wrap(model, adamw(model), example_batch=batch, device=device, progress=False)
    wrapped, _ = protrain.wrap(
        model, adamw(model), example_batch=batch, device=device, dtype="float32", weights=tmp_path, progress=False
    )
    assert_same({k: v.cpu() for k, v in wrapped.state_dict().items()}, dict(reference.state_dict()))


def _remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    change(tensors)
    safetensors_torch.save_file(tensors, file)


def _with(key: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({key: value}))


def _without(keys: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if re.search(keys, key)]:
            del tensors[key]

    return lambda folder: rewrite(folder, change)


def _other_head(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1}))


POSITIONS, GATE = "transformer.wpe.weight", "model.layers.1.block_sparse_moe.gate.weight"
OTHERS = r"experts\.0\.w[12]\.weight and {} more in model\.safetensors"
NOT_MERGED = r" do not make model\.layers\.1\.mlp\.experts\.gate_up_proj, as transformers"
DAMAGE: list[tuple[Callable[[], Any], Callable[[Path], None], str]] = [
    (gpt2, _remove, r"no \.safetensors file in"),
    (gpt2, _truncate, "cannot be read: "),
    (gpt2, _without(r"h\.2\.ln_1\.bias"), r"lacks 1 of \d+ parameters, among them transformer\.h\.2\.ln_1\.bias"),
    (
        gpt2,
        _with(POSITIONS, torch.zeros(64, WIDTH).to(torch.float8_e4m3fn)),
        r"transformer\.wpe\.weight in model\.safetensors is F8_E4M3: quantized .*; save the model in bfloat16",
    ),
    (
        gpt2,
        _with(POSITIONS, torch.zeros(5, WIDTH)),
        r"transformer\.wpe\.weight in model\.safetensors has shape \(5, 48\), the model's is \(64, 48\)",
    ),
    (
        gpt2,
        _other_head,
        r"transformer\.wte\.weight and lm_head\.weight in .* have different values, and both are transformer\.wte",
    ),
    (mixtral, _without(r"layers\.1.*experts\.2\."), OTHERS.format(5) + r".* has shape \(3, 128, 32\)"),
    (mixtral, _without(r"layers\.1.*experts\.2\.w1"), OTHERS.format(6) + NOT_MERGED),
    (mixtral, _with(f"{EXPERT}.w1.weight", torch.zeros(64, 31)), OTHERS.format(7) + NOT_MERGED),
    (mixtral, _without(r"layers\.1.*w2"), r"lacks 1 of \d+ parameters, among them model\.layers\.1\..*\.down_proj"),
    (
        mixtral,
        _with(GATE, torch.zeros(4, 31)),
        r"gate\.weight in .*, which is model\.layers\.1\.mlp\.gate\.weight in the model, has shape \(4, 31\)",
    ),
]


@pytest.mark.usefixtures("no_profile")
@pytest.mark.parametrize(("make", "damage", "words"), DAMAGE)
def test_damaged_weights_are_named_before_anything_is_loaded(
    make: Callable[[], Any], damage: Callable[[Path], None], words: str, tmp_path: Path, wrapped: Callable[..., Any]
) -> None:
    saved(tmp_path, make)
    damage(tmp_path)
    model = empty(make)
    with pytest.raises(ValueError, match=f"weights: .*{words}"):
        wrapped(model, weights=tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.usefixtures("no_profile")
def test_a_missing_shard_is_noticed(tmp_path: Path, wrapped: Callable[..., Any]) -> None:
    saved(tmp_path, shards=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    lost = index["weight_map"]["transformer.h.1.mlp.c_fc.weight"]
    (tmp_path / lost).unlink()
    with pytest.raises(ValueError, match=rf"weights: .*{lost} cannot be read: "):
        wrapped(empty(), weights=tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"weights: .*index.json cannot be read: 'weight_map'"):
        wrapped(empty(), weights=tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"lacks \d+ of \d+ parameters"):
        wrapped(empty(), weights=tmp_path)


def test_a_model_of_no_library_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = residual.make()
    safetensors_torch.save_file(source.state_dict(), tmp_path / "model.safetensors")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    model = empty(residual.make)
    wrapped, _ = wrap_under(SPECS[0], model, adamw(model), residual.batches(1)[0], weights=tmp_path)
    assert_same(dict(wrapped.state_dict()), dict(source.state_dict()))


def test_a_transformers_without_rules_of_merging_reads_what_needs_none(
    tmp_path: Path, wrapped: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, mixtral)
    monkeypatch.delattr("transformers.core_model_loading.rename_source_key")
    with pytest.raises(
        ValueError, match=r"lacks \d+ of \d+ parameters, among them model\.layers\.0\.mlp\.gate\.weight"
    ):
        wrapped(empty(mixtral), weights=tmp_path)
    reference = saved(tmp_path)
    model, _ = wrapped(empty(), weights=tmp_path)
    assert_same({k: v.cpu() for k, v in model.state_dict().items()}, dict(reference.state_dict()))
