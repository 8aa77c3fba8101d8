"""Ctrl-C between the making of a host job and its queueing: whatever waits for the job does not wait for ever."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.updates import Updates
from protrain.engine.updates.worker import HostWorker
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import CKPT, NONE, Loop, Spec, adamw, assert_same, default_loss, seeded, states, wrap_under
from tests.engine.residual import batches, make

SPECS = (
    Spec("none", "least", (NONE,), small=True),
    Spec("none", "least", (NONE, CKPT), small=True, speculate=True, weights=True),
    Spec("some", "least", (CKPT, NONE), small=True, speculate=True, stream=True),
)
pytestmark = pytest.mark.timeout(30)  # what would fail here is a hang


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


@functools.cache
def two_steps(spec: Spec, device: torch.device) -> dict[str, Tensor]:
    model, optimizer = wrapped(spec, device)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return states(model, optimizer)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_update_that_was_made_is_done(spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = wrapped(spec, device)
    begin, counted = Chunk.begin, Interrupted(lambda: None)

    def begun(chunk: Chunk, *args: Any, **options: Any) -> None:
        begin(chunk, *args, **options)
        counted()

    backward(model)
    with monkeypatch.context() as patch:
        patch.setattr(Chunk, "begin", begun)
        optimizer.step()
    optimizer.zero_grad()
    assert counted.calls > 2
    backward(model)
    counted.at, counted.calls = counted.calls, 0
    with monkeypatch.context() as patch:  # the last update is begun, and step() does not get to know of it
        patch.setattr(Chunk, "begin", begun)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.state_dict()
    assert_same(states(model, optimizer), two_steps(spec, device))
    optimizer.zero_grad()
    assert torch.tensor(Loop().run(model, optimizer, batches(2))).isfinite().all()


@pytest.mark.parametrize(
    ("spec", "at"), [(SPECS[0], 1), (SPECS[0], 4), (SPECS[1], 2), (SPECS[1], 4), (SPECS[2], 1), (SPECS[2], 2)], ids=str
)
def test_updates_that_are_yet_to_be_queued_are_done(
    spec: Spec, at: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(spec, device)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    queue = Interrupted(HostWorker.queue, at=at)
    with monkeypatch.context() as patch:
        patch.setattr(HostWorker, "queue", lambda worker, job: queue(worker, job))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.state_dict()
    assert_same(states(model, optimizer), two_steps(spec, device))
    optimizer.zero_grad()
    assert torch.tensor(Loop().run(model, optimizer, batches(2))).isfinite().all()


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
