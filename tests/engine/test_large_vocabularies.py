"""Embeddings and heads larger than blocks: chunks of a block all the same, with the same bits and as planned."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.errors import PlanError
from protrain.optim import ProTrainOptimizer
from protrain.planning import Plan, evaluate, frontier, pack
from protrain.planning.layout import chunk_sizes
from protrain.profiler import ModelProfile
from tests.engine.harness import CKPT, NONE, SWAP, Loop, adamw, assert_same, plain_run, states
from tests.engine.lateness import Lateness
from tests.engine.true_memory import make_batch, make_model, plans_within_budgets, true_peak_bytes

WORDS = 3000  # by 64: 192,000 elements, of a block 40,000 to 50,000
HARDWARE = protrain.hardware.detect("cpu", device_memory="1GiB", host_memory="1GiB")


def make(family: str) -> nn.Module:
    """``family`` may end in "-frozen": then only blocks are trained, as with adapters."""
    model = make_model(family.removesuffix("-frozen"), WORDS)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not family.endswith("-frozen") or "layers" in name)
    return model


def traced(family: str, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> ModelProfile:
    return protrain.profile(model, make_batch(), optimizer=adamw(model), device="cpu", dtype=dtype)


def plan_of(profile: ModelProfile, n_more: int, mode: Any, *, inside: bool = False, **counts: Any) -> Plan:
    """With ``n_more`` persistent chunks than must be, and every block in ``mode``."""
    small, usual = chunk_sizes(profile)
    layout = pack(profile, small)
    assert layout.chunks[0].elements > usual / 2 > small / 2
    n_persist = min(len(layout.chunks), layout.least_persist + n_more)
    n_blocks = len(profile.blocks)
    return evaluate(
        profile,
        HARDWARE,
        n_persist=n_persist,
        n_buffer=min(3, len(layout.chunks) - n_persist),
        n_swap=n_blocks * (mode is SWAP),
        n_ckpt=n_blocks * (mode is CKPT),
        chunk_elements=small,
        step_during_backward=inside,
        **counts,
    )


def wrap_with(
    plan: Plan, family: str, device: torch.device, *, device_memory: int | str = "1GiB", inside: bool = False
) -> tuple[nn.Module, ProTrainOptimizer]:
    model = make(family)
    return protrain.wrap(
        model,
        adamw(model),
        example_batch=make_batch(),
        device=device,
        dtype=torch.bfloat16,
        plan=plan,
        device_memory=device_memory,
        host_memory="1GiB",
        step_during_backward=inside,
        progress=False,
    )


@pytest.mark.parametrize("inside", [False, True], ids=["clipping", "inside-backward"])
@pytest.mark.parametrize(("n_more", "mode"), [(0, CKPT), (0, SWAP), (1, NONE), (100, CKPT)], ids=str)
@pytest.mark.parametrize(("family", "least"), [("llama", 2), ("llama-frozen", 2), ("gpt2", 0), ("t5", 0)])
def test_bits(family: str, least: int, n_more: int, mode: Any, inside: bool, device: torch.device) -> None:
    data = [make_batch() for _ in range(4)]
    loop = Loop(max_norm=None if inside else 0.5)
    expected, final = plain_run(lambda: make(family), data, loop=loop, device=device, dtype=torch.bfloat16)
    plan = plan_of(traced(family, make(family)), n_more, mode, inside=inside)
    assert plan.n_persist >= least
    wrapped, optimizer = wrap_with(plan, family, device, inside=inside)
    assert optimizer.plan.chunk_elements == plan.chunk_elements
    assert loop.run(wrapped, optimizer, data) == expected
    assert_same(states(wrapped, optimizer), final)


def test_buffers_are_as_large_as_what_passes_through_them() -> None:
    """Of a tied embedding that does not persist they have its size, else that of a block."""
    model = make("gpt2")
    profile = traced("gpt2", model)
    blocks = pack(profile, chunk_sizes(profile)[0]).chunks[1:]
    for n_more, elements in ((0, WORDS * 64), (1, max(chunk.elements for chunk in blocks))):
        plan = plan_of(profile, n_more, CKPT)
        _, optimizer = wrap_with(plan, "gpt2", torch.device("cpu"))
        buffers = optimizer._engine.buffers.buffers
        assert {buffer.memory.numel() for buffer in buffers} == {elements}
        assert optimizer.report().host_bytes <= plan.host_bytes


@pytest.mark.parametrize("schedule", ["late", "early"])
@pytest.mark.parametrize(("family", "n_more"), [("llama", 0), ("llama", 100), ("gpt2", 1)])
def test_sums_of_gradients_take_no_more_of_the_device(
    family: str, n_more: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made on demand, in host memory: what passes through the device has room in the 16-bit gradient's."""
    data = [make_batch() for _ in range(4)]
    loop, device = Loop(max_norm=0.5, accumulate=2), torch.device("cpu")
    expected, final = plain_run(lambda: make(family), data, loop=loop, device=device, dtype=torch.bfloat16)
    plan = plan_of(traced(family, make(family)), n_more, CKPT)
    wrapped, optimizer = wrap_with(plan, family, device, device_memory=plan.device_bytes)
    assert true_peak_bytes(wrapped, optimizer, data[0], backwards=2) <= plan.device_bytes
    assert all(chunk.accumulator_on_host for chunk in optimizer._engine.chunks)
    with Lateness(schedule).applied(monkeypatch):
        wrapped, optimizer = wrap_with(plan, family, device, device_memory=plan.device_bytes)
        assert loop.run(wrapped, optimizer, data) == expected
        assert_same(states(wrapped, optimizer), final)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama-frozen", "gpt2", "t5"])
def test_the_true_peak_keeps_within_every_budget(family: str, dtype: torch.dtype) -> None:
    plans = plans_within_budgets(lambda: make(family), make_batch(16), dtype, count=6)
    small, _ = chunk_sizes(traced(family, make(family), dtype))
    assert min(plan.chunk_elements for plan in plans) == small, "no plan has chunks of a block"


def test_the_frontier_begins_with_the_least_of_both_ways() -> None:
    profile = traced("gpt2", make("gpt2"))
    points = frontier(profile, HARDWARE, n_limits=4).points
    least = points[0].device_limit_bytes
    assert points[0].plan.device_bytes == least
    with pytest.raises(PlanError):
        protrain.search(profile, replace(HARDWARE, device_bytes=least - 1))
    assert points[-1].plan.chunk_elements == chunk_sizes(profile)[0]


def test_what_more_memory_would_gain_is_asked_of_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """But of a plan with chunks of a size that somebody chose with that size."""
    profile = traced("llama", make("llama"))
    asked: list[int | None] = []

    def search(*args: Any, chunk_elements: int | None, **options: Any) -> Plan:
        asked.append(chunk_elements)
        return protrain.search(*args, chunk_elements=chunk_elements, **options)

    monkeypatch.setattr(
        sys.modules["protrain.planning.explain"], "search", search
    )  # the package has a function explain
    small, usual = chunk_sizes(profile)
    for size, expected in ((small, None), (usual, None), (usual + 128, usual + 128)):
        evaluate(profile, HARDWARE, n_persist=2, n_buffer=1, n_swap=0, n_ckpt=4, chunk_elements=size).explain(
            profile, HARDWARE
        )
        assert set(asked) == {expected}
        asked.clear()


def test_what_lies_out_of_order_must_persist() -> None:
    model = make("llama")
    profile = traced("llama", model)
    small, _ = chunk_sizes(profile)
    counts: dict[str, Any] = {"n_swap": 0, "n_ckpt": 4, "chunk_elements": small}
    with pytest.raises(
        ValueError, match="n_persist must be 2 to 6, the first 2 of large parameters, and 6 in all, not 1"
    ):
        evaluate(profile, HARDWARE, n_persist=1, n_buffer=2, **counts)
    plan = evaluate(profile, HARDWARE, n_persist=2, n_buffer=2, **counts)
    changes = {(change.knob, change.step): change for change in plan.explain(profile, HARDWARE).changes}
    assert changes["n_persist", -1].impossible == "chunks of large parameters must persist"
    assert not changes["n_persist", 1].impossible
