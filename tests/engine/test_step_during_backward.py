"""step_during_backward: the paper's updates inside backward give the bits of updates in step(), or refuse to.

Chunks share a few buffers for their gradients then, as many as the plan says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError, PlanError
from protrain.engine.gradients.gradients import GradientPools
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import BlockMode
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    seeded,
    states,
    wrap_under,
)
from tests.engine.lateness import Lateness

SPECS = (
    Spec("all", "least", (NONE, CKPT), small=True),
    Spec("some", "least", (SWAP, CKPT, NONE), small=True),
    Spec("none", "least", (CKPT,), small=True),
    Spec("none", "all", (NONE,), small=True),
    Spec("none", "least", (CKPT, NONE), small=True, stream=True),
)
CPU = torch.device("cpu")
WIDTH = 64
Batch = dict[str, Tensor]
Wrapped = tuple[nn.Module, ProTrainOptimizer]
Wrap = Callable[..., Wrapped]


@pytest.fixture
def wrapped(tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], device: torch.device) -> Wrap:
    """``wrapped(spec, family, **options)``: a tiny model in as little host memory as it can do with."""

    def build(spec: Spec = SPECS[1], family: str = "gpt2", **options: Any) -> Wrapped:
        model = tiny_model(family)
        options |= {"step_during_backward": True, "tight_host": True}
        return wrap_under(spec, model, adamw(model), tiny_batch(), device=device, **options)

    return build


# GPT-2 has tied weights, used at the start and at the end. LLaMA has none.
@pytest.mark.parametrize(("spec", "family"), [*zip(SPECS, ("gpt2", "llama") * 3, strict=False)], ids=str)
def test_the_bits_are_those_of_the_plain_loop(
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
    spec: Spec,
    family: str,
    device: torch.device,
) -> None:
    def no_more(_: GradientPools, persistent: bool) -> Tensor:
        raise AssertionError("there are as many buffers as are needed")

    monkeypatch.setattr(GradientPools, "_more", no_more)
    options: dict[str, Any] = {"device": device, "step_during_backward": True, "tight_host": True}
    options["dtype"] = (torch.float32, torch.bfloat16)[SPECS.index(spec) // 2 % 2]
    batches = [tiny_batch(seed) for seed in range(3)]
    (optimizer,) = check_equal_to_plain(lambda: tiny_model(family), batches, specs=[spec], **options)
    plan = optimizer.plan
    n_away = plan.n_chunks - plan.n_persist
    assert (plan.n_device_gradient > 0) == (plan.n_persist > 2)
    assert (plan.n_host_gradient > 0) == (n_away > 3)
    assert plan.n_device_gradient < max(1, plan.n_persist)
    assert plan.n_host_gradient < max(1, n_away)


def make_residual() -> nn.Module:
    return residual.make(WIDTH, depth=6)


@pytest.mark.parametrize(
    ("spec", "lateness"),
    [
        *((SPECS[index], Lateness("late")) for index in (1, 2, 4)),
        *((SPECS[2], Lateness("late", seed)) for seed in range(3)),  # whose copies come at any time, and updates late
        (SPECS[4], Lateness("early")),
    ],
    ids=str,
)
def test_a_buffer_is_handed_on_when_nothing_reads_it_any_more(
    spec: Spec, lateness: Lateness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and updates come as late as the engine's own ordering allows."""
    monkeypatch.setattr("protrain.engine.states.chunks._SLICE_ELEMENTS", 128)
    options: dict[str, Any] = {"step_during_backward": True, "tight_host": True, "dtype": torch.bfloat16}
    with lateness.applied(monkeypatch):
        (optimizer,) = check_equal_to_plain(make_residual, residual.batches(4), specs=[spec], **options)
    assert 0 < optimizer.plan.n_host_gradient < optimizer.plan.n_chunks / 2


class Layer(nn.Module):
    """One of whose parameters can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.alone = False

    def forward(self, x: Tensor) -> Tensor:
        added = torch.tanh(self.linear(x))
        return x + (added if self.alone else added * self.factor)


@pytest.mark.parametrize(("spec", "has_memory"), [(SPECS[0], True), (SPECS[2], True), (SPECS[2], False)], ids=str)
def test_chunks_that_wait_for_the_end_of_backward_get_more_buffers_where_there_is_memory(
    spec: Spec, has_memory: bool, device: torch.device
) -> None:
    """One of which some parameters get no gradient is complete only then; the planned batch used them all."""

    def layers_under(*, inside: bool) -> Wrapped:
        with seeded():
            model = nn.Sequential(*(Layer() for _ in range(6)))
        options: dict[str, Any] = {"step_during_backward": inside, "tight_host": inside}
        return wrap_under(spec, model, adamw(model), (torch.ones(4, WIDTH),), device=device, **options)

    def trained(model: nn.Module, optimizer: ProTrainOptimizer) -> tuple[list[float], dict[str, Tensor]]:
        """With all parameters, then with some, then with all."""
        torch.manual_seed(0)
        values = []
        for alone in (False, True, True, False):
            for layer in model.children():
                vars(layer)["alone"] = alone
            values += Loop().run(model, optimizer, [(torch.randn(4, WIDTH),)])
        return values, states(model, optimizer)

    model, optimizer = layers_under(inside=True)
    memory, n_shared = optimizer._engine.memory, optimizer.plan.n_host_gradient
    before = memory.arena.total_bytes
    memory.host_bytes = before + 2**20 * has_memory
    if not has_memory:
        with pytest.raises(PlanError, match="Parameters without a gradient in this backward keep more chunks waiting"):
            trained(model, optimizer)
        return
    losses, final = trained(model, optimizer)
    expected = trained(*layers_under(inside=False))
    assert losses == expected[0]
    assert_same(final, expected[1])
    made_bytes = memory.arena.total_bytes - before
    assert (made_bytes > 0) == (spec.persist == "none")
    assert made_bytes <= (optimizer.plan.n_chunks - n_shared) * optimizer.plan.chunk_elements * 4


def test_host_memory_is_twelve_bytes_a_parameter_and_the_shared_buffers(device: torch.device) -> None:
    model = residual.make(width=256, depth=8)
    elements = sum(parameter.numel() for parameter in model.parameters())
    options: dict[str, Any] = {"dtype": torch.bfloat16, "step_during_backward": True, "tight_host": True}
    spec = Spec("none", "least", (CKPT,))
    _, optimizer = wrap_under(spec, model, adamw(model), residual.batches(1)[0], device=device, **options)
    plan, host_bytes = optimizer.plan, optimizer.report().host_bytes
    assert 0 < plan.n_host_gradient < plan.n_chunks / 2
    shared_bytes = plan.n_host_gradient * plan.chunk_elements * 2
    assert 12 * elements + shared_bytes <= host_bytes <= 12.1 * elements + shared_bytes
    assert 0 <= plan.host_bytes - host_bytes <= 2 * 1024**2


def test_a_skipped_step_is_an_error(wrapped: Wrap, tiny_batch: Callable[..., Batch]) -> None:
    results = []
    for skip in (False, True):
        model, optimizer = wrapped()
        model(**tiny_batch()).loss.backward()
        if skip:
            with pytest.raises(MisuseError, match=r"backward\(\) before step\(\).*every step\(\) must be called"):
                model(**tiny_batch()).loss.backward()
        optimizer.step()
        with pytest.raises(MisuseError, match="without gradients"):
            optimizer.step()
        model(**tiny_batch(1)).loss.backward()
        optimizer.step()
        results.append(states(model, optimizer))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=str)
def test_what_needs_gradients_or_zeros_is_an_error(wrapped: Wrap, tiny_batch: Callable[..., Batch], spec: Spec) -> None:
    model, optimizer = wrapped(spec)
    inside = r"made inside backward.*wrap with step_during_backward=False"
    for _ in range(2):  # before and after a step
        with pytest.raises(MisuseError, match=inside):
            optimizer.clip_grad_norm_(1.0)
        with pytest.raises(MisuseError, match=r"call zero_grad\(\) without set_to_none=False"):
            optimizer.zero_grad(set_to_none=False)
        model(**tiny_batch()).loss.backward()
        with pytest.raises(MisuseError, match=r"made inside backward"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())


class Borrowing(nn.Module):
    """Its first block uses the weight of the last module, whose gradient arrives long before that block's."""

    class Block(nn.Module):
        def __init__(self, lender: nn.Linear | None = None) -> None:
            super().__init__()
            self.own, self.lender = nn.Linear(24, 24), lender

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.own(x))
            return hidden if self.lender is None else hidden + nn.functional.linear(x, self.lender.weight.detach())

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 24), nn.Linear(24, 24)
        self.blocks = nn.ModuleList([self.Block(self.leave), *(self.Block() for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


@pytest.mark.parametrize(("persist", "mode"), [("all", NONE), ("none", CKPT)])
def test_a_weight_that_backward_needs_after_its_update_is_said(
    persist: str, mode: BlockMode, device: torch.device
) -> None:
    spec, batch, model = Spec(persist, "least", (mode,), small=True), (torch.ones(4, 8),), Borrowing()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batch, device=device, step_during_backward=True)
    with pytest.raises(MisuseError, match=r"blocks.0 needs a weight that step_during_backward=True updated already"):
        wrapped(*batch).backward()
    model = Borrowing()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batch, device=device)
    assert len(set(Loop().run(wrapped, optimizer, [batch] * 2))) == 2
