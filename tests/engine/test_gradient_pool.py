"""Inside backward chunks share a few buffers for their gradients: the bits stay the same, and memory is less."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import PlanError
from protrain.engine.gradients.gradients import GradientPools
from protrain.engine.states.arena import whole_pages
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
    Loop,
    Spec,
    adamw,
    assert_same,
    default_loss,
    plain_run,
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
HOST = SPECS[2]
WIDTH = 64
CPU = torch.device("cpu")
Batch = dict[str, Tensor]
Wrapped = tuple[nn.Module, ProTrainOptimizer]
Wrap = Callable[..., Wrapped]


@pytest.fixture
def wrapped(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], device: torch.device
) -> Callable[..., Wrapped]:
    def build(spec: Spec, *, family: str = "gpt2", **options: Any) -> Wrapped:
        model = tiny_model(family)
        options |= {"step_during_backward": True, "tight_host": True}
        return wrap_under(spec, model, adamw(model), tiny_batch(), device=device, **options)

    return build


@pytest.fixture(scope="module")
def plainly_trained(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch]
) -> Callable[..., tuple[list[float], dict[str, Tensor]]]:
    """Losses and states of the plain loop, which are made once."""

    @functools.cache
    def run(family: str, dtype: torch.dtype, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
        batches = [tiny_batch(seed) for seed in range(3)]
        return plain_run(lambda: tiny_model(family), batches, loop=Loop(), device=device, dtype=dtype)

    return run


# GPT-2 has tied weights, used at the start and at the end. LLaMA has none.
@pytest.mark.parametrize(("spec", "family"), [*zip(SPECS, ("gpt2", "llama") * 3, strict=False)], ids=str)
def test_the_bits_are_those_of_the_plain_loop(
    wrapped: Wrap,
    plainly_trained: Callable[..., tuple[list[float], dict[str, Tensor]]],
    tiny_batch: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
    spec: Spec,
    family: str,
    device: torch.device,
) -> None:
    forbid_more(monkeypatch)
    dtype = (torch.float32, torch.bfloat16)[SPECS.index(spec) // 2 % 2]
    expected, final = plainly_trained(family, dtype, device)
    model, optimizer = wrapped(spec, family=family, dtype=dtype)
    plan = optimizer.plan
    n_away = plan.n_chunks - plan.n_persist
    assert (plan.n_device_gradient > 0) == (plan.n_persist > 2)
    assert (plan.n_host_gradient > 0) == (n_away > 3)
    assert plan.n_device_gradient < max(1, plan.n_persist)
    assert plan.n_host_gradient < max(1, n_away)
    assert len(set(expected)) > 1, "it does not train"
    assert Loop().run(model, optimizer, [tiny_batch(seed) for seed in range(3)]) == expected
    assert_same(states(model, optimizer), final)


def make_residual() -> nn.Module:
    return residual.make(WIDTH, depth=6)


@functools.cache
def expected_of_residual() -> tuple[list[float], dict[str, Tensor]]:
    return plain_run(make_residual, residual.batches(4), loop=Loop(), device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (SPECS[1], Lateness("late")),
        (SPECS[2], Lateness("late")),
        (SPECS[4], Lateness("late")),
        (SPECS[1], Lateness("early")),
        (SPECS[4], Lateness("early")),
        (SPECS[2], Lateness("random", 0)),
    ],
    ids=str,
)
def test_a_buffer_is_handed_on_when_nothing_reads_it_any_more(
    spec: Spec, kind: Lateness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and updates come as late as the engine's own ordering allows."""
    expected = expected_of_residual()
    monkeypatch.setattr("protrain.engine.states.chunks._SLICE_ELEMENTS", 128)
    with kind.applied(monkeypatch):
        model = make_residual()
        options: dict[str, Any] = {"step_during_backward": True, "tight_host": True, "dtype": torch.bfloat16}
        model, optimizer = wrap_under(spec, model, adamw(model), residual.batches(1)[0], device=CPU, **options)
        assert 0 < optimizer.plan.n_host_gradient < optimizer.plan.n_chunks / 2
        assert Loop().run(model, optimizer, residual.batches(4)) == expected[0]
        assert_same(states(model, optimizer), expected[1])


def forbid_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of engines that are yet to be built."""

    def no_more(_: GradientPools, persistent: bool) -> Tensor:
        raise AssertionError("there are as many buffers as are needed")

    monkeypatch.setattr(GradientPools, "_more", no_more)


class Layer(nn.Module):
    """One of whose parameters can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.alone = self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            x.register_hook(fail)
        added = torch.tanh(self.linear(x))
        return x + (added if self.alone else added * self.factor)


def fail(_: Tensor) -> Tensor:
    raise ArithmeticError("backward fails")


def layers_under(*, inside: bool, device: torch.device) -> Wrapped:
    with seeded():
        model = nn.Sequential(*(Layer() for _ in range(6)))
    options: dict[str, Any] = {"step_during_backward": inside, "tight_host": inside}
    return wrap_under(HOST, model, adamw(model), (torch.ones(4, WIDTH),), device=device, **options)


def trained(model: nn.Module, optimizer: ProTrainOptimizer) -> tuple[list[float], dict[str, Tensor]]:
    """With all parameters, then with some, then with all."""
    torch.manual_seed(0)
    values = []
    for alone in (False, True, True, False):
        for layer in model.children():
            assert isinstance(layer, Layer)
            layer.alone = alone
        values += Loop().run(model, optimizer, [(torch.randn(4, WIDTH),)])
    return values, states(model, optimizer)


def test_chunks_that_wait_for_the_end_of_backward_get_more_buffers(device: torch.device) -> None:
    """One of which some parameters get no gradient is complete only then; the planned batch used them all."""
    expected = trained(*layers_under(inside=False, device=device))
    model, optimizer = layers_under(inside=True, device=device)
    engine = optimizer._engine
    engine.memory.host_bytes += 2**20
    before = engine.memory.arena.total_bytes
    n_more = optimizer.plan.n_chunks - optimizer.plan.n_host_gradient
    assert n_more > 0
    found = trained(model, optimizer)
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
    made, rest = divmod(engine.memory.arena.total_bytes - before, whole_pages(optimizer.plan.chunk_elements * 4))
    assert rest == 0
    assert 0 < made <= n_more


@pytest.mark.parametrize("forget", [False, True], ids=["no-zero_grad", "zero_grad"])
def test_what_was_updated_before_a_backward_fails_is_not_updated_again(device: torch.device, forget: bool) -> None:
    found = []
    for sharing in (False, True):
        model, optimizer = layers_under(inside=sharing, device=device)
        batch = (torch.ones(4, WIDTH),)
        layers: Any = model
        if sharing:
            layers[1].fails = True
            with pytest.raises(ArithmeticError, match="backward fails"):
                default_loss(model, batch).backward()
            layers[1].fails = False
            optimizer.step()
            if forget:
                optimizer.zero_grad()
        else:
            for layer in layers[:2]:
                layer.requires_grad_(False)
            default_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            for layer in layers[:2]:
                layer.requires_grad_(True)
        default_loss(model, batch).backward()
        optimizer.step()
        found.append(states(model, optimizer))
    assert_same(found[1], found[0])


def test_where_there_is_no_memory_for_more_that_is_said(device: torch.device) -> None:
    model, optimizer = layers_under(inside=True, device=device)
    optimizer._engine.memory.host_bytes = optimizer._engine.memory.arena.total_bytes
    with pytest.raises(PlanError, match="Parameters without a gradient in this backward keep more chunks waiting"):
        trained(model, optimizer)


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
