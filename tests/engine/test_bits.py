"""The plan never changes the result: under every kind of plan steps have the bits of the plain loop."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.engine import residual
from tests.engine.harness import (
    NONE,
    PLANS,
    Batch,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    plain_run,
    seeded,
    states,
    wrap_under,
)

transformers = pytest.importorskip("transformers")

STEPS = {"cpu": 3, "cuda": 20}  # of a CPU's minutes they take most
VOCABULARY, WIDTH, BATCH, SEQUENCE = 64, 32, 2, 16
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQUENCE,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=SEQUENCE
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        max_position_embeddings=SEQUENCE,
        dropout=0.1,
    ),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=SEQUENCE // 2),
}


@dataclass(frozen=True)
class Setting:
    """How a training is done."""

    dtype: torch.dtype
    loop: Loop


SETTINGS = {
    "fp32": Setting(torch.float32, Loop()),
    "fp32-accumulate": Setting(torch.float32, Loop(max_norm=0.5, accumulate=2)),
    "bf16-clip": Setting(torch.bfloat16, Loop(max_norm=0.5)),
    "bf16-clip-accumulate": Setting(torch.bfloat16, Loop(max_norm=0.5, accumulate=3, no_sync=True)),
    "bf16-clip-accumulate-two": Setting(torch.bfloat16, Loop(max_norm=0.5, accumulate=2)),
    # Scaled so that the first steps overflow and are skipped.
    "fp16-clip": Setting(torch.float16, Loop(max_norm=0.5, loss=lambda model, batch: model(**batch).loss * 8)),
}


def make(family: str) -> nn.Module:
    with seeded():
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    return model


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (count, BATCH, SEQUENCE), generator=generator)
    return [{"input_ids": part.clone(), "labels": part.clone()} for part in tokens]


@functools.cache
def plain(family: str, setting: str, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    chosen = SETTINGS[setting]
    data = batches(STEPS[device.type] * chosen.loop.accumulate)
    return plain_run(lambda: make(family), data, loop=chosen.loop, device=device, dtype=chosen.dtype)


# On a CPU a plan meets one setting, and a setting meets two models, because the whole product takes minutes there.
MODELS_ON_CPU = {
    "bf16-clip": ("gpt2", "opt"),
    "bf16-clip-accumulate": ("opt", "llama"),
    "bf16-clip-accumulate-two": ("llama", "mistral"),
    "fp32": ("gpt2", "mistral"),
    "fp32-accumulate": ("opt", "llama"),
    "fp16-clip": ("llama", "mistral"),  # of the others two steps of three overflow
}


def cases() -> Iterator[Any]:
    """Every model with every setting and plan on a GPU; on a CPU one setting for each plan."""
    for number, spec in enumerate(PLANS):
        turn, at = divmod(number, len(SETTINGS))
        setting = list(SETTINGS)[at]
        family = MODELS_ON_CPU[setting][turn % 2]
        yield pytest.param("cpu", family, setting, spec, id=f"cpu-{family}-{setting}-{spec}")
    for family, setting, spec in itertools.product(CONFIGS, SETTINGS, PLANS):
        yield pytest.param("cuda", family, setting, spec, id=f"cuda-{family}-{setting}-{spec}", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "family", "setting", "spec"), list(cases()), indirect=["device"])
def test_every_plan_has_the_bits_of_the_plain_loop(family: str, setting: str, spec: Spec, device: torch.device) -> None:
    expected, final = plain(family, setting, device)
    chosen = SETTINGS[setting]
    data = batches(STEPS[device.type] * chosen.loop.accumulate)
    model = make(family)
    options: dict[str, Any] = {"dtype": chosen.dtype, "accumulation": chosen.loop.accumulate}
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, **options)
    assert chosen.loop.run(wrapped, optimizer, data) == expected
    assert_same(states(wrapped, optimizer), final)
    assert (0 < optimizer.skipped_steps <= STEPS[device.type] // 2) == (setting == "fp16-clip")


def test_backward_finds_weights_in_another_buffer_than_forward_did(device: torch.device) -> None:
    """Under most plans a chunk comes back to the buffer that it had, and a view that is not made anew is right."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found = default_loss(model, batch)
        with torch.no_grad():
            default_loss(model, (batch[0][:4],))
        return found

    loop, spec = Loop(max_norm=1.0, loss=loss), Spec("none", "middle", (NONE,))
    check_equal_to_plain(residual.make, residual.batches(2), device=device, loop=loop, specs=(spec,))


def test_adam_with_coupled_weight_decay(device: torch.device) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.1)

    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "optimizer": adam}
    check_equal_to_plain(residual.make, residual.batches(2), **options)


def test_another_default_dtype_of_torch_changes_nothing() -> None:
    outcomes = []
    for default in (torch.float32, torch.bfloat16):
        model, data = residual.make(), residual.batches(3)
        torch.set_default_dtype(default)
        try:
            options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "progress": False}
            model, optimizer = protrain.wrap(model, adamw(model), example_batch=data[0], **options)
            Loop().run(model, optimizer, data)
            state = optimizer.full_state_dict()["state"]
            outcomes.append(states(model, optimizer) | {f"step {at}": each["step"] for at, each in state.items()})
        finally:
            torch.set_default_dtype(torch.float32)
    assert_same(*outcomes)
