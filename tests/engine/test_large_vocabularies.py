"""Embeddings and heads larger than blocks: in large chunks, others of a block, with the same bits and as planned."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.batch import loss_of
from protrain.hardware.detection import detect
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import MemoryModel, Plan, evaluate, pack
from protrain.planning.plan import layout_of
from protrain.planning.schedule import Fetches, most_held
from protrain.profiler.model_profile import ModelProfile
from tests.engine.harness import CKPT, NONE, SWAP, Loop, adamw, assert_same, plain_run, states
from tests.engine.profiles import shared_profile
from tests.engine.true_memory import make_batch, make_model

WORDS = 1500  # by 64: 96,000 elements, of a block 40,000 to 50,000
BATCH = make_batch(1)  # in bf16 a CPU multiplies by a large table slowly
HARDWARE = detect("cpu", device_memory="1GiB", host_memory="1GiB")


class _Pair(nn.Module):
    """Two tables in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WORDS + more, 64) * 0.1) for more in (0, 9))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.first) + nn.functional.embedding(ids, self.second)


class _TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = _Pair()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 320), nn.Linear(320, 64)) for _ in range(4))
        self.head = nn.Linear(64, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def make(family: str) -> nn.Module:
    """``family`` may end in "-frozen": then only blocks are trained, as with adapters."""
    if family.startswith("two-tables"):
        torch.manual_seed(0)
        model: nn.Module = _TwoTables()
    else:
        model = make_model(family.removesuffix("-frozen"), WORDS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not family.endswith("-frozen") or "layers" in name)
    return model


@functools.cache
def traced(family: str) -> ModelProfile:
    model = make(family)
    return shared_profile(model, BATCH, optimizer=adamw(model), device=torch.device("cpu"), dtype=torch.bfloat16)


def plan_of(profile: ModelProfile, n_persist: int, mode: Any, *, inside: bool = False) -> Plan:
    """With every block in ``mode``."""
    layout = pack(profile)
    assert any(layout.is_large(chunk) for chunk in layout.chunks)
    n_persist = min(len(layout.chunks), n_persist)
    memory = MemoryModel(profile, HARDWARE, layout, step_during_backward=inside)
    n_blocks = len(profile.blocks)
    return evaluate(
        profile,
        HARDWARE,
        n_persist=n_persist,
        n_buffer=min(max(2, memory.least_buffers[n_persist]), memory.all_buffers[n_persist]),
        n_swap=n_blocks * (mode is SWAP),
        n_ckpt=n_blocks * (mode is CKPT),
        step_during_backward=inside,
    )


def wrap_with(plan: Plan, family: str, device: torch.device, **options: Any) -> tuple[nn.Module, ProTrainOptimizer]:
    model = make(family)
    options |= {"device": device, "dtype": torch.bfloat16, "plan": plan, "progress": False}
    limits: dict[str, Any] = {"device_memory": "1GiB", "host_memory": "1GiB"}
    return protrain.wrap(model, adamw(model), example_batch=BATCH, **limits, **options)


@pytest.mark.parametrize(
    ("family", "n_persist", "mode", "inside"),
    [
        ("llama", 0, CKPT, True),
        ("llama", 1, CKPT, False),
        ("llama", 100, CKPT, True),
        ("llama-frozen", 0, SWAP, True),
        ("llama-frozen", 2, NONE, False),
        ("gpt2", 0, CKPT, False),
        ("gpt2", 1, CKPT, True),
        ("gpt2", 100, CKPT, False),
        ("t5", 0, SWAP, False),
        ("t5", 2, NONE, True),
    ],
)
def test_bits(family: str, n_persist: int, mode: Any, inside: bool, device: torch.device) -> None:
    """Every family and every plan with updates inside backward, and with clipping."""
    loop = Loop() if inside else Loop(max_norm=0.5)
    plan = plan_of(traced(family), n_persist, mode, inside=inside)
    expected, final = plain_run(lambda: make(family), [BATCH] * 2, run=loop.run, device=device, dtype=torch.bfloat16)
    wrapped, optimizer = wrap_with(plan, family, device, step_during_backward=inside)
    assert loop.run(wrapped, optimizer, [BATCH] * 2) == expected
    assert_same(states(wrapped, optimizer), final)


@pytest.mark.parametrize(
    ("family", "n_persist"), [("llama", 0), ("llama", 1), ("llama-frozen", 0), ("gpt2", 0), ("two-tables-frozen", 0)]
)
def test_chunks_are_fetched_as_predicted(family: str, n_persist: int) -> None:
    profile = traced(family)
    plan = plan_of(profile, n_persist, CKPT)
    layout = layout_of(profile, plan)
    wrapped, optimizer = wrap_with(plan, family, torch.device("cpu"))
    issued = []
    for _ in range(2):
        loss_of(wrapped(**BATCH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state_dict()  # waits, so that no upload is late
        issued.append(optimizer.report().fetches)
    visits = [*profile.calls, *reversed(profile.calls)]
    held = [layout.unit_chunks[unit] for unit in visits]
    n_large = [n_large for _, n_large in most_held(profile, layout)]
    fetches = Fetches(visits, held, layout, n_large).of(plan.n_persist, plan.n_buffer)
    assert issued[1] - issued[0] == sum(map(len, fetches))
