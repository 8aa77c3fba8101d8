"""The plan never changes the result: under every kind of plan steps have the bits of the plain loop."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import protrain
from tests.engine import residual
from tests.engine.families import make_of_transformers, texts
from tests.engine.harness import (
    FEW_PLANS,
    PLANS,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    states,
)

STEPS = {"cpu": 3, "cuda": 20}  # of a CPU's minutes they take most
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4},
    "opt": {"num_hidden_layers": 5, "dropout": 0.1},
    "llama": {"num_hidden_layers": 4},
    "mistral": {"num_hidden_layers": 4},
}


SETTINGS: dict[str, tuple[torch.dtype, Loop]] = {
    "fp32": (torch.float32, Loop()),
    "fp32-accumulate": (torch.float32, Loop(max_norm=0.5, accumulate=2)),
    "bf16-clip": (torch.bfloat16, Loop(max_norm=0.5)),
    "bf16-clip-accumulate": (torch.bfloat16, Loop(max_norm=0.5, accumulate=3, no_sync=True)),
    "bf16-clip-accumulate-two": (torch.bfloat16, Loop(max_norm=0.5, accumulate=2)),
    # Scaled so that the first steps overflow and are skipped.
    "fp16-clip": (torch.float16, Loop(max_norm=0.5, loss=lambda model, batch: model(**batch).loss * 8)),
}


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
    for family, setting, spec in itertools.product(FAMILIES, SETTINGS, PLANS):
        yield pytest.param("cuda", family, setting, spec, id=f"cuda-{family}-{setting}-{spec}", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "family", "setting", "spec"), list(cases()), indirect=["device"])
def test_every_plan_has_the_bits_of_the_plain_loop(family: str, setting: str, spec: Spec, device: torch.device) -> None:
    dtype, loop = SETTINGS[setting]
    make = functools.partial(make_of_transformers, family, "AutoModelForCausalLM", FAMILIES[family])
    how: dict[str, Any] = {"device": device, "dtype": dtype, "accumulation": loop.accumulate, "specs": [spec]}
    (optimizer,) = check_equal_to_plain(make, texts(STEPS[device.type] * loop.accumulate), run=loop.run, **how)
    assert (0 < optimizer.skipped_steps <= STEPS[device.type] // 2) == (setting == "fp16-clip")


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**16)], ids=str)
def test_the_sum_of_several_backwards_is_rounded_once(dtype: torch.dtype, scale: float) -> None:
    """By torch alone, which shares no code with the engine, its kernels or the plain loop.

    The momentum of the first step is the gradient that norm and update see, times 1 - beta1.
    """
    data = residual.batches(3)
    model, optimizer = residual.wrapped(FEW_PLANS[0], dtype=dtype, accumulation=3)
    plain = residual.make().to(dtype)
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    for batch in data:
        optimizer.backward(default_loss(model, batch))
    norm = optimizer.clip_grad_norm_(1e6)
    optimizer.step()
    torch.manual_seed(1)
    of_each = []
    for (x,) in data:
        gradients = torch.autograd.grad(default_loss(plain, (x.to(dtype),)) * scale, list(plain.parameters()))
        of_each.append([gradient.float() for gradient in gradients])
    squares = 0.0
    for (name, _), first, second, third in zip(plain.named_parameters(), *of_each, strict=True):
        total = (first + second + third) / scale
        finished = (total * scale).to(dtype).float() / scale
        assert not torch.equal(finished, total), "rounding changes nothing here"
        assert torch.equal(optimizer.export_parameter(name)["exp_avg"], finished * (1 - 0.9)), name
        squares += finished.double().square().sum().item()
    assert norm.item() == pytest.approx(squares**0.5, rel=1e-6)


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
