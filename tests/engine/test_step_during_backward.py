"""step_during_backward: the paper's updates inside backward give the bits of updates in step(), or refuse to.

Chunks share a few buffers for their gradients then, as many as the plan says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError, PlanError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    Loop,
    Spec,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    seeded,
    states,
    wrap_under,
)
from tests.engine.lateness import Lateness

SPECS = (
    Spec("all", "least", "nc", small=True),
    Spec("some", "least", "scn", small=True),
    Spec("none", "least", "c", small=True),
    Spec("none", "all", "n", small=True),
    Spec("none", "least", "cn", small=True, stream=True),
)
WIDTH = 64
Wrapped = tuple[nn.Module, ProTrainOptimizer]


@pytest.mark.parametrize(
    ("spec", "lateness"),
    [
        *((spec, Lateness("late")) for spec in SPECS[1:]),
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
        (optimizer,) = check_equal_to_plain(
            partial(residual.make, WIDTH, 6), residual.batches(4), specs=[spec], **options
        )
    plan = optimizer.plan
    assert 0 < plan.n_host_gradient < (plan.n_chunks - plan.n_persist) / 2


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
    spec = Spec("none", "least", "c")
    _, optimizer = wrap_under(spec, model, adamw(model), residual.batches(1)[0], device=device, **options)
    plan, host_bytes = optimizer.plan, optimizer.report().host_bytes
    assert 0 < plan.n_host_gradient < plan.n_chunks / 2
    shared_bytes = plan.n_host_gradient * plan.chunk_elements * 2
    assert 12 * elements + shared_bytes <= host_bytes <= 12.1 * elements + shared_bytes
    assert 0 <= plan.host_bytes - host_bytes <= 2 * 1024**2


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=str)
def test_what_needs_gradients_or_another_order_is_an_error_that_does_no_harm(spec: Spec) -> None:
    inside = "made inside backward"
    with residual.unharmed(spec, steps=1, step_during_backward=True) as (model, optimizer):
        (first, *_) = residual.batches()
        for refused, words in (
            (lambda: optimizer.clip_grad_norm_(1.0), f"{inside}.*wrap with step_during_backward=False"),
            (lambda: optimizer.zero_grad(set_to_none=False), r"call zero_grad\(\) without set_to_none=False"),
            (optimizer.step, "without gradients"),
        ):
            with pytest.raises(MisuseError, match=words):
                refused()
    model, optimizer = residual.wrapped(spec, step_during_backward=True)
    default_loss(model, first).backward()
    with pytest.raises(MisuseError, match=inside):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(MisuseError, match=r"backward\(\) before step\(\).*every step\(\) must be called"):
        default_loss(model, first).backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("persist", "mode"), [("all", "n"), ("none", "c")])
def test_a_weight_that_backward_needs_after_its_update_is_said(persist: str, mode: str, device: torch.device) -> None:
    """The first block uses the weight of the last module, whose gradient arrives long before that block's."""
    model: Any = residual.make()

    def borrow(block: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + nn.functional.linear(inputs[0], block.lender.weight.detach()).sum(-1, keepdim=True)

    model.leave = model.blocks[0].lender = nn.Linear(48, 48)  # large enough for a chunk of its own
    model.blocks[0].register_forward_hook(borrow)
    spec, batch = Spec(persist, "least", mode, small=True), residual.batches(1)[0]
    wrapped, _ = wrap_under(spec, model, adamw(model), batch, device=device, step_during_backward=True)
    with pytest.raises(MisuseError, match=r"blocks.0 needs a weight that step_during_backward=True updated already"):
        default_loss(wrapped, batch).backward()
