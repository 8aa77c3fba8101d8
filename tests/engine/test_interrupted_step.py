"""Ctrl-C anywhere in step(), or where backward makes updates: no update is lost, and none is waited for for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.engine.updates.updates import Updates
from protrain.engine.updates.worker import HostWorker
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    CKPT,
    NONE,
    Calls,
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

SPECS = (
    Spec("none", "least", (NONE,), small=True),
    Spec("none", "least", (NONE, CKPT), small=True, speculate=True, weights=True),
    Spec("some", "least", (CKPT, NONE), small=True, speculate=True, stream=True),
)
POINTS = 24
pytestmark = pytest.mark.timeout(60)  # what would fail here is a hang


class Interrupted:
    """Calls ``function``, but for the call ``at``."""

    def __init__(self, function: Callable[..., Any], *, at: int = 0) -> None:
        self.function = function
        self.at = at
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)


def wrapped(spec: Spec, device: torch.device, **options: Any) -> tuple[nn.Module, ProTrainOptimizer]:
    model = make()
    return wrap_under(spec, model, adamw(model), batches()[0], device=device, **options)


def backward(model: nn.Module) -> None:
    with seeded():
        default_loss(model, batches()[1]).backward()


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_step_is_carried_out_as_a_whole_or_not_at_all(spec: Spec, clipped: bool, device: torch.device) -> None:
    """One that was not carried out can be called again."""
    training, undisturbed = wrapped(spec, device), wrapped(spec, device)

    def begin(*, calls: Calls) -> None:
        """A step of ``training`` up to the interrupt, and one of ``undisturbed`` up to its update."""
        for model, optimizer in (training, undisturbed):
            backward(model)
            if clipped:
                optimizer.clip_grad_norm_(0.1)
        with calls, contextlib.suppress(KeyboardInterrupt):
            training[1].step()

    def end() -> None:
        undisturbed[1].step()
        assert_same(states(*training), states(*undisturbed))
        for _, optimizer in (training, undisturbed):
            optimizer.zero_grad()

    counted = Calls()
    begin(calls=counted)
    end()
    done = set()
    for point in range(POINTS):
        begin(calls=Calls(at=1 + counted.made * point // POINTS))
        version = states(*undisturbed)
        found = states(*training)
        done.add(carried_out := any(not torch.equal(found[name], version[name]) for name in found))
        if not carried_out:
            training[1].step()
        end()
    assert done == {False, True}
    assert Loop().run(*training, batches(2)) == Loop().run(*undisturbed, batches(2))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_interrupt_of_an_update_inside_backward(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(spec, device, step_during_backward=True)
    before = states(model, optimizer)
    queue = Interrupted(HostWorker.queue, at=2)
    with monkeypatch.context() as patch:
        patch.setattr(HostWorker, "queue", lambda worker, job: queue(worker, job))
        with pytest.raises(KeyboardInterrupt):
            backward(model)
    optimizer.state_dict()
    found = states(model, optimizer)
    backward_of_another, other = wrapped(spec, device, step_during_backward=True)
    backward(backward_of_another)
    other.step()
    after = states(backward_of_another, other)
    whole = [name for name, value in found.items() if torch.equal(value, after[name])]
    rest = [name for name in found if name not in whole]
    assert any(name.startswith("exp_avg.") for name in whole)
    assert any(name.startswith("exp_avg.") for name in rest)
    assert_same({name: found[name] for name in rest}, {name: before[name] for name in rest})


@pytest.mark.parametrize("ends", ["step", "zero_grad"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_interrupt_at_the_end_of_a_backward_with_updates_inside(
    spec: Spec, ends: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(spec, device, step_during_backward=True)
    with monkeypatch.context() as patch:
        patch.setattr(Updates, "end_backward", Interrupted(lambda: None, at=1))
        with pytest.raises(KeyboardInterrupt):
            backward(model)
    with pytest.raises(MisuseError, match="before step"):
        backward(model)
    if ends == "step":
        optimizer.step()
    optimizer.zero_grad()
    other, plain = wrapped(spec, device, step_during_backward=True)
    backward(other)
    plain.step()
    plain.zero_grad()
    assert_same(states(model, optimizer), states(other, plain))
    assert Loop().run(model, optimizer, batches(2)) == Loop().run(other, plain, batches(2))
