"""Profiles that follow from others are those of a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from protrain.cli import plan_trace
from protrain.cli.commands import build_parser
from protrain.cli.plan_step import ProfiledStep
from protrain.cli.plan_trace import counted
from protrain.profiler.blocks import find_blocks
from protrain.profiler.derived import TRACED_BLOCKS, keep_few_blocks
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
        patch.setattr("protrain.cli.plan_trace.keep_few_blocks", lambda model: 0)
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


SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
LAYERS = {"num_hidden_layers": 6, "intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2}
KINDS = [["global", "local"], 3]


# The number of blocks that are traced of six.
@pytest.mark.parametrize(
    ("family", "options", "n_traced"),
    [
        ("Llama", LAYERS, TRACED_BLOCKS),
        ("Qwen3Moe", {**LAYERS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, TRACED_BLOCKS),
        ("Gemma2", LAYERS, 6),  # every second block attends to a window
        ("GPTNeo", {"num_layers": 6, "num_heads": 4, "attention_types": [KINDS]}, 6),
        ("Llama", {**LAYERS, "num_hidden_layers": 3}, 3),
    ],
)
def test_a_folder_is_known_by_a_few_blocks_where_all_are_alike(
    family: str, options: dict[str, Any], n_traced: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForCausalLM"], **SIZES, **options)
    config.save_pretrained(tmp_path)
    asked = replace(step(str(tmp_path), "--no-compile"), layers=None)
    assert len(plan_trace._traced(asked)[0].blocks) == n_traced
    assert counted(asked) == traced(asked, monkeypatch)


class Block(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(2, 2)
        self.number, self.kind = number, 0


def test_blocks_that_share_weights_or_differ_in_a_setting_are_not_alike() -> None:
    alike, set_apart, shared, trained = (list(map(Block, range(6))) for _ in range(4))
    set_apart[5].kind = 1
    shared[4].weight = shared[5].weight
    trained[1].bias.requires_grad_(False)
    models = [nn.Sequential(nn.ModuleList(blocks)) for blocks in (alike, set_apart, shared, trained)]
    assert [keep_few_blocks(model) for model in models] == [2, 0, 0, 0]
    assert [len(find_blocks(model)) for model in models] == [TRACED_BLOCKS, 6, 6, 6]


def test_two_batches_tell_of_others() -> None:
    whole = replace(step("llama3-8b", "--no-compile", "--no-chunked-loss"), sequence=512)
    known, traced, other = (counted(replace(whole, batch=batch)) for batch in (16, 8, 4))
    assert known.at_batch(16, other) == known
    assert replace(known.at_batch(4, other), output_bytes=other.output_bytes) == other
    found = known.at_batch(8, other)
    assert (found.tokens, found.batch_shapes) == (traced.tokens, traced.batch_shapes)
    for ours, true in zip(found.blocks, traced.blocks, strict=True):
        for name, size in vars(true).items():
            exact = not isinstance(size, int) or name.endswith("flops")
            assert getattr(ours, name) == (size if exact else pytest.approx(size, rel=0.01)), name
    for one, two in zip(found.segments, traced.segments, strict=True):
        assert one.live_bytes == pytest.approx(two.live_bytes, rel=0.05, abs=2**20)
        assert one.peak_bytes == pytest.approx(two.peak_bytes, abs=2**24)


def test_a_loss_in_pieces_takes_the_same_for_any_batch() -> None:
    known, other, traced = (
        counted(replace(step("llama3-8b", "--no-compile"), batch=batch)) for batch in (256, 128, 64)
    )
    largest = [max(each.peak_bytes for each in profile.segments) for profile in (known.at_batch(64, other), traced)]
    assert largest[0] == pytest.approx(largest[1], rel=0.01)
