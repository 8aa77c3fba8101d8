"""Managed parameters whose flags are changed, or whose values are edited, after wrapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    NONE,
    SWAP,
    Loop,
    Spec,
    adamw,
    assert_same,
    default_loss,
    seeded,
    states,
    wrap_under,
)
from tests.engine.residual import batches, make

RESIDENT = Spec("all", "least", (NONE,))
SPECS = (
    RESIDENT,
    Spec("some", "least", (CKPT, SWAP, NONE), speculate=True),
    Spec("none", "least", (CKPT_SWAP, NONE), small=True, speculate=True),
)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_was_frozen_when_wrapped_cannot_be_trained(spec: Spec, device: torch.device) -> None:
    def wrapped() -> tuple[nn.Module, ProTrainOptimizer]:
        model = make()
        model.get_submodule("blocks.1").requires_grad_(False)
        return wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)

    data = batches(3)
    model, optimizer = wrapped()
    frozen = model.get_parameter("blocks.1.first.weight")
    attempts: list[Callable[[], Any]] = [
        lambda: model.requires_grad_(True),
        lambda: frozen.requires_grad_(),
        lambda: setattr(frozen, "requires_grad", True),
    ]
    for attempt in attempts:
        attempt()
        assert frozen.requires_grad
        with pytest.raises(MisuseError, match=r"blocks\.1\..* was frozen when .* wrapped.*wrap the model anew"):
            model(*data[0])
        model.get_submodule("blocks.1").requires_grad_(False)
        assert not frozen.requires_grad
    untouched = wrapped()
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_forward_without_gradients_may_thaw_what_was_frozen_when_wrapped(spec: Spec, device: torch.device) -> None:
    """As the adapters of peft have it, of which set_adapter chooses one that TRL's DPOTrainer compares with."""

    def run(model: nn.Module, optimizer: ProTrainOptimizer, *, thaws: bool) -> list[float]:
        losses = Loop().run(model, optimizer, data[:2])
        with torch.no_grad():
            model.get_submodule("blocks.1").requires_grad_(thaws)
            losses.append(float(default_loss(model, data[2])))
            model.get_submodule("blocks.1").requires_grad_(False)
        return losses + Loop().run(model, optimizer, data[2:])

    def wrapped() -> tuple[nn.Module, ProTrainOptimizer]:
        model = make()
        model.get_submodule("blocks.1").requires_grad_(False)
        return wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)

    data = batches(4)
    one, other = wrapped(), wrapped()
    assert run(*one, thaws=True) == run(*other, thaws=False)
    assert_same(states(*one), states(*other))
    with torch.no_grad():
        one[0].get_submodule("blocks.1").requires_grad_(True)
    with pytest.raises(MisuseError, match=r"blocks\.1\..* was frozen when .* wrapped.*wrap the model anew"):
        one[0](*data[0])


# -- full_parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_wrong_shape_keeps_no_edit_and_does_no_harm(spec: Spec, device: torch.device) -> None:
    def edit() -> None:
        with protrain.full_parameters(model), torch.no_grad():
            model.get_parameter("enter.weight").zero_()
            model.get_parameter("blocks.1.norm.bias").data = torch.zeros(7)
            model.get_parameter("leave.weight").zero_()

    data = batches(3)
    (model, optimizer), untouched = (wrap_under(spec, m, adamw(m), data[0], device=device) for m in (make(), make()))
    with pytest.raises(ValueError, match=r"blocks\.1\.norm\.bias was given the shape \(7,\), not \(48,\): no edit"):
        edit()
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_nothing_runs_inside_full_parameters(spec: Spec, device: torch.device) -> None:
    data = batches(3)
    (model, optimizer), untouched = (wrap_under(spec, m, adamw(m), data[0], device=device) for m in (make(), make()))
    loss = default_loss(model, data[0])
    runs: list[tuple[str, Callable[[], Any]]] = [
        ("the forward of enter", lambda: model(*data[0])),
        (r"backward\(\)", lambda: loss.backward()),
        (r"step\(\)", lambda: optimizer.step()),
        (r"export_parameter\(\)", lambda: optimizer.export_parameter("enter.weight")),
        (r"state_dict\(\)", lambda: optimizer.state_dict()),
    ]
    for what, run in runs:
        with (
            pytest.raises(MisuseError, match=rf"{what} inside .*full_parameters.*which has blocks.1.*leave it first"),
            protrain.full_parameters(model.get_submodule("blocks.1")),
        ):
            run()
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))


# -- edits elsewhere ---------------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data.mul_(0.5),
    "no_grad": lambda p: torch.no_grad()(p.mul_)(0.5),
    "init": lambda p: nn.init.zeros_(p),  # zero and a negative remainder would be NaN
    "rows": lambda p: p.data[1:3].fill_(0.25),
    "assigned rows": lambda p: p.detach().__setitem__(1, 0.25),
    "a view of a view": lambda p: p.detach().view(-1)[3:9].view(2, 3).add_(1.0),
    "out": lambda p: torch.no_grad()(torch.zeros)(p.shape, out=p.detach()),
    "all at once": lambda p: torch._foreach_mul_([p.detach()], 0.5),
    "replaced": lambda p: setattr(p, "data", torch.zeros(p.shape, dtype=p.dtype, device=p.device)),
}


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(SPECS[0], torch.bfloat16), (SPECS[1], torch.float32), (SPECS[2], torch.float16)],
    ids=str,
)
def test_an_edit_outside_full_parameters_is_refused_at_once_and_changes_nothing(
    spec: Spec, dtype: torch.dtype, device: torch.device
) -> None:
    data, inner, other = batches(2), make(), make()
    model, optimizer = wrap_under(spec, inner, adamw(inner), data[0], device=device, dtype=dtype)
    untouched = wrap_under(spec, other, adamw(other), data[0], device=device, dtype=dtype)
    for moment in ("before a step", "between forward and backward", "before step()"):
        for edit in EDITS.values():
            if moment == "between forward and backward":
                loss = default_loss(model, data[1])
            elif moment == "before step()":
                optimizer.backward(default_loss(model, data[1]))
            with pytest.raises(MisuseError, match=r"data of blocks\.1\.first\.weight was .*full_parameters"):
                edit(model.get_parameter("blocks.1.first.weight"))
            if moment == "between forward and backward":
                optimizer.backward(loss)
            optimizer.zero_grad()
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))


class Renormed(nn.Module):
    """An embedding changes its own weight in forward when it has a max_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("spec", [RESIDENT, Spec("none", "least", (CKPT,))], ids=str)
def test_a_forward_that_edits_its_weight_is_refused(spec: Spec, device: torch.device) -> None:
    """It is refused in every later use, too, as the weight of the last step may be gone."""
    ids = torch.arange(32).view(2, 16)
    with seeded():
        inner = Renormed()
    model, _ = wrap_under(spec, inner, adamw(inner), (ids,), device=device, dtype=torch.bfloat16)
    embedding: Any = model.get_submodule("embedding")
    for max_norm in (1e6, None):  # no row is that long, and autograd counts it as an edit all the same
        embedding.max_norm = max_norm
        with pytest.raises(MisuseError, match=r"data of embedding\.weight was changed in place .*full_parameters"):
            model(ids)


@pytest.mark.parametrize("inside", [False, True], ids=["step", "step-during-backward"])
def test_an_option_that_is_not_known_is_refused_after_wrapping_too(inside: bool, device: torch.device) -> None:
    results = []
    for misused in (False, True):
        model = make()
        wrapped, optimizer = wrap_under(
            SPECS[1], model, adamw(model), batches()[0], device=device, step_during_backward=inside
        )
        if misused:
            optimizer.param_groups[1]["maximize"] = True
            with pytest.raises(ValueError, match="maximize=True of Adam and AdamW is not supported"):
                Loop().run(wrapped, optimizer, batches())
            optimizer.param_groups[1]["maximize"] = False
            optimizer.zero_grad()
            state = optimizer.state_dict()
            state["param_groups"][0]["amsgrad"] = True
            with pytest.raises(ValueError, match="amsgrad=True of Adam and AdamW is not supported"):
                optimizer.load_state_dict(state)
        Loop().run(wrapped, optimizer, batches())
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


def test_entering_full_parameters_without_memory_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    data, cpu = batches(3), torch.device("cpu")
    (model, optimizer), untouched = (wrap_under(SPECS[1], m, adamw(m), data[0], device=cpu) for m in (make(), make()))
    clone, calls = Tensor.clone, iter(range(1, 1000))

    def short(tensor: Tensor, **options: Any) -> Tensor:
        if next(calls) == 4:
            raise MemoryError("no memory for the copy")
        return clone(tensor, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", short)
        with pytest.raises(MemoryError, match="no memory for the copy"), protrain.full_parameters(model):
            raise AssertionError("not reached")
    assert Loop().run(model, optimizer, data) == Loop().run(*untouched, data)
    assert_same(states(model, optimizer), states(*untouched))
