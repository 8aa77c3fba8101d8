"""The profile cache: its key changes with everything that a profile depends on, and with nothing else."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from protrain.common.cache import cache_folder
from protrain.forward.compilation import compile_blocks
from protrain.profiler import cache, kept_profiles
from protrain.profiler.blocks import find_blocks
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.step_times import Together
from protrain.profiler.trace import profile

BATCH = (torch.randn(2, 8),)


@dataclass(frozen=True)
class _Config:
    rounds: int = 1


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.scale = 1.0
        self.config = _Config()
        numbers: Any = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
        numbers.quant_type = "nf4"
        self.numbers = numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x)) * self.scale


def _model() -> nn.Sequential:
    return nn.Sequential(*(_Block() for _ in range(3)))


def _key(model: nn.Module, batch: Any = BATCH, dtype: torch.dtype = torch.bfloat16, **options: Any) -> str:
    optimizer = options.get("optimizer") or torch.optim.AdamW(model.parameters())
    return cache.fingerprint(model, batch, optimizer=optimizer, device=torch.device("cpu"), dtype=dtype)


def _compile(model: nn.Module) -> None:
    compile_blocks([model.get_submodule(path) for path in find_blocks(model)])


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model[1], "scale", 2.0),
    "of dropout": lambda model: setattr(model[1].dropout, "p", 0.2),
    "a config": lambda model: setattr(model[1], "config", _Config(rounds=2)),
    "frozen": lambda model: model[1].linear.weight.requires_grad_(False),
    "quantised otherwise": lambda model: setattr(model[1].numbers, "quant_type", "fp4"),
    "tied": lambda model: setattr(model[2].linear, "weight", model[0].linear.weight),
    "shared": lambda model: setattr(model[2], "linear", model[0].linear),
    "evaluated": lambda model: model[1].eval(),
    "compiled": _compile,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_changes_the_key(change: str) -> None:
    model = _model()
    CHANGES[change](model)
    assert _key(model) != _key(_model())


def test_batch_dtype_groups_and_switches_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    key = _key(model)
    assert _key(model, (torch.randn(3, 8),)) != key
    assert _key(model, (torch.randn(2, 8, dtype=torch.float64),)) != key
    assert _key(model, dtype=torch.float16) != key
    parameters = list(model.parameters())
    groups = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
    assert _key(model, optimizer=groups) != key
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    assert _key(model) != key


def test_what_torch_computes_in_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile of a model without autocast has no memory for what operators save in fp32 under it."""
    keys = [_key(_model())]
    for cached, dtype in ((True, torch.bfloat16), (True, torch.float16), (False, torch.bfloat16)):
        with torch.autocast("cpu", dtype, cache_enabled=cached):
            keys.append(_key(_model()))
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.set_default_dtype(torch.bfloat16)
    try:
        keys.append(_key(model, optimizer=optimizer))
    finally:
        torch.set_default_dtype(torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends, "fp32_precision", "tf32")  # as transformers does where it compiles
        keys.append(_key(_model()))
    assert len(set(keys)) == 6
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert _key(_model()) == keys[0]


def test_how_attention_is_computed_is_part_of_the_key(tiny_model: Callable[[str], Any]) -> None:
    """It decides what blocks save, and transformers writes it into no file."""
    model, keys = tiny_model("llama"), []
    for attention in ("sdpa", "eager", "sdpa"):
        model.set_attn_implementation(attention)
        keys.append(_key(model, (torch.zeros(1, 8, dtype=torch.long),)))
    assert keys[0] == keys[2] != keys[1]


def test_edited_code_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "helpers.py"
    file.write_text("SCALE = 1\n")
    module = types.ModuleType("helpers_of_a_model")
    module.__file__ = os.fspath(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    key = _key(_model())
    assert _key(_model()) == key
    file.write_text("SCALE = 2\n")
    assert _key(_model()) != key


def test_a_profile_is_made_once_and_again_when_its_file_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    monkeypatch.setenv("PROTRAIN_CACHE", "1")
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    made = []

    def count(*args: Any, **options: Any) -> Any:
        made.append(1)
        return profile(model, BATCH, optimizer=optimizer, device="cpu")

    monkeypatch.setattr(cache, "profile", count)
    monkeypatch.setattr(cache, "fingerprint", lambda *args, **options: "key")
    given: Any = {"optimizer": optimizer, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    first = cache.cached_profile(model, BATCH, **given)
    assert cache.cached_profile(model, BATCH, **given) == first
    assert len(made) == 1
    (cache_folder() / "profiles" / "key.json").write_text("{")
    cache.cached_profile(model, BATCH, **given)
    assert len(made) == 2
    monkeypatch.setenv("PROTRAIN_CACHE", "0")
    cache.cached_profile(model, BATCH, **given)
    assert len(made) == 3
    monkeypatch.setenv("PROTRAIN_CACHE", "1")
    cache.cached_profile(model, BATCH, **{**given, "device": torch.device("cpu")})
    assert len(made) == 4, "a CPU's profile is not kept"
    asked = []

    class Missing(Together):
        def largest(self, what: str, number: float) -> float:
            asked.append(number)
            return 1.0

    cache.cached_profile(model, BATCH, **given, together=Missing())
    assert len(made) == 5, "all ranks profile if one has to"
    assert asked == [0.0]


def test_old_profiles_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    monkeypatch.setenv("PROTRAIN_CACHE", "1")
    monkeypatch.setattr(kept_profiles, "_KEPT", 2)
    made = profile(_model(), BATCH, device="cpu")
    folder = cache_folder() / "profiles"
    for age, name in enumerate("abc"):
        kept_profiles.kept("profiles", ModelProfile, name, lambda: made)
        os.utime(folder / f"{name}.json", (age, age))
    assert {path.stem for path in folder.glob("*.json")} == {"b", "c"}
