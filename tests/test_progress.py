"""What wrap prints on standard error."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn, ones

import protrain
from protrain import wrapping
from protrain.common import progress
from protrain.hardware.detection import detect
from tests.engine.harness import adamw

PART = re.compile(r"moving model states into place, \d+ s, (\d+)%: (\S+)")


def test_a_gpu_that_is_not_calibrated_is_said_where_a_plan_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrapped(device_type: str, source: str, plan: Any = None) -> tuple[Any, str]:
        """The plan, and what wrap prints."""
        hardware = dataclasses.replace(detect("cpu"), device_type=device_type, source=source)
        monkeypatch.setattr(wrapping, "detect", lambda *_, **__: hardware)
        model = nn.Linear(4, 4)
        _, optimizer = protrain.wrap(model, adamw(model), example_batch=(ones(2, 4),), device="cpu", plan=plan)
        return optimizer.plan, capsys.readouterr().err

    plan, said = wrapped("cuda", "detected")
    assert "not calibrated" in said
    assert "protrain: planning: " in said
    for silent in (("cuda", "detected", plan), ("cuda", "measured"), ("cpu", "detected")):
        assert "not calibrated" not in wrapped(*silent)[1]


@pytest.mark.parametrize("source", ["memory", "meta", "weights"])
def test_the_weights_are_seen_to_arrive(
    source: str,
    tiny_model: Callable[..., Any],
    tiny_batch: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(progress, "_LONG_S", 0.0)
    model = tiny_model("llama")
    names = {name for name, _ in model.named_parameters()}
    if source == "weights":
        model.save_pretrained(tmp_path)
    if source != "memory":
        with protrain.empty_parameters():
            model = type(model)(model.config)
    weights = tmp_path if source == "weights" else None
    protrain.wrap(model, adamw(model), example_batch=tiny_batch(), device="cpu", weights=weights)
    seen = PART.findall(capsys.readouterr().err)
    shares = [int(share) for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert names <= {name for _, name in seen}


def test_a_long_stage_says_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = iter((0.0, 1.0, 4.0, 5.0))
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock_s)))
    with progress.stage("profiling the model") as show:
        show("forward of layers.2")
        show("forward of layers.3")
    said = capsys.readouterr().err
    assert "layers.2" not in said, "it comes too soon"
    assert "4 s: forward of layers.3" in said
    assert said.endswith("protrain: profiling the model: 5.0 s\n")


def test_what_nobody_reads_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        os.close(reader)
        with progress.stage("planning"):
            progress.print_line("something")
        print("also what others write", file=pipe)
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        progress.say("to a disk without room")
    monkeypatch.setattr(sys, "stderr", None)
    with progress.stage("planning"):
        progress.say("in a process without standard error")
