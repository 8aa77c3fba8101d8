"""What wrap says on standard error."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import protrain
from tests.engine.harness import adamw

BAR = re.compile(r"moving model states into place \[[#.]+\] +(\d+)% (\S+)")
wrapping = importlib.import_module("protrain.wrap")


@pytest.mark.parametrize(
    ("device_type", "source", "planned", "said"),
    [
        ("cuda", "detected", False, True),
        ("cuda", "detected", True, False),
        ("cuda", "measured", False, False),
        ("cpu", "detected", False, False),
    ],
)
def test_a_gpu_that_is_not_calibrated_is_said(
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device_type: str,
    source: str,
    planned: bool,
    said: bool,
) -> None:
    detect = wrapping.detect

    def found(*args: Any, **options: Any) -> Any:
        return dataclasses.replace(detect(*args, **options), device_type=device_type, source=source)

    monkeypatch.setattr(wrapping, "detect", found)
    plan = None
    for _ in range(1 + planned):
        capsys.readouterr()
        model = tiny_model("gpt2")
        _, optimizer = protrain.wrap(model, adamw(model), example_batch=tiny_batch(), device="cpu", plan=plan)
        plan = optimizer.plan
    printed = capsys.readouterr().err
    assert ("not calibrated" in printed) is said
    assert "protrain: planning: " in printed


@pytest.mark.parametrize("source", ["memory", "meta", "weights"])
def test_a_terminal_sees_the_weights_arrive(
    source: str,
    tiny_model: Callable[..., Any],
    tiny_batch: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "300")
    model = tiny_model("llama")
    names = {name for name, _ in model.named_parameters()}
    if source == "weights":
        model.save_pretrained(tmp_path)
    if source != "memory":
        with protrain.empty_parameters():
            model = type(model)(model.config)
    weights = tmp_path if source == "weights" else None
    protrain.wrap(model, adamw(model), example_batch=tiny_batch(), device="cpu", weights=weights)
    seen = BAR.findall(capsys.readouterr().err)
    shares = [int(share) for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert names <= {name for _, name in seen}
