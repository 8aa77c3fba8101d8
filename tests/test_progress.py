"""What wrap says on standard error."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import protrain
from tests.engine.harness import adamw

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
