"""Profiles that follow from others are those of a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protrain.cli.commands import build_parser
from protrain.cli.plan_step import ProfiledStep
from protrain.cli.plan_trace import counted
from protrain.profiler.derived import at_batch
from protrain.profiler.model_profile import ModelProfile

pytest.importorskip("transformers")

DEPTH = 7


def step(model: str, *options: str) -> ProfiledStep:
    words = ["plan", model, "--hardware", "h100", "--batch", "2", "--sequence", "64", *options]
    return replace(ProfiledStep.of(build_parser("plan").parse_args(words), "cuda"), layers=DEPTH)


def traced(step: ProfiledStep, monkeypatch: pytest.MonkeyPatch) -> ModelProfile:
    """The profile of a trace of all blocks."""
    with monkeypatch.context() as patch:
        patch.setattr("protrain.cli.plan_trace.TRACED_BLOCKS", DEPTH)
        return counted(step)


@pytest.mark.parametrize("model", ["tiny", "gpt2", "opt-13b", "llama3-8b", "mistral-7b", "qwen2.5-7b"])
def test_a_deep_model_is_known_by_a_few_of_its_blocks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = step(model, "--no-compile")
    assert counted(asked) == traced(asked, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--packing"], ["--lora", "r=2"], ["--lora", "r=2", "--load-in-4bit"]])
def test_so_is_one_with_compiled_blocks_an_adapter_or_4_bit_weights(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("peft", "bitsandbytes", "accelerate") if options else ():
        pytest.importorskip(package)
    asked = step("llama3.2-1b", *options)
    assert counted(asked) == traced(asked, monkeypatch)


def test_two_batches_tell_of_those_between_them() -> None:
    low, high, between = (counted(replace(step("llama3-8b", "--no-compile"), batch=batch)) for batch in (2, 10, 4))
    found = at_batch(low, high, 0.25)
    assert (found.tokens, found.batch_shapes) == (between.tokens, between.batch_shapes)
    assert found.blocks == between.blocks
    for one, other in zip(found.segments, between.segments, strict=True):
        assert one.live_bytes == other.live_bytes
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.3, abs=2**20)
