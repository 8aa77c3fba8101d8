"""Ctrl-C, or no memory left, in the middle of a step: nothing is lost, and nothing is waited for for ever."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.engine.activations import swap
from protrain.engine.updates.updates import Updates
from protrain.engine.updates.worker import HostWorker
from protrain.engine.weights.buffers import BufferPool
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
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


CPU = torch.device("cpu")
DATA = batches(3)
Wrapped = tuple[nn.Module, ProTrainOptimizer]


def narrow(spec: Spec) -> Wrapped:
    model = make(width=16, depth=3)
    return wrap_under(spec, model, adamw(model), DATA[0], device=CPU)


def train(training: Wrapped, numbers: tuple[int, ...]) -> list[float]:
    model, optimizer = training
    losses = []
    for number in numbers:
        torch.manual_seed(number)
        loss = default_loss(model, DATA[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_goes_on(training: Wrapped, undisturbed: Wrapped, number: int, *, where: str) -> None:
    """A step of ``training`` has the loss of the same step of one that was never interrupted."""
    assert train(training, (number,)) == train(undisturbed, (number,)), where


@pytest.mark.parametrize("buffers", ["least", "middle"])
@pytest.mark.parametrize("name", ["_issue", "_upload"])
def test_a_chunk_that_never_came_up_is_not_taken_for_there(
    buffers: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec("none", buffers, (NONE,), small=True)
    training, undisturbed = narrow(spec), narrow(spec)
    check_goes_on(training, undisturbed, 0, where="before")
    for at in (1, 2, 5):
        for _, optimizer in (training, undisturbed):
            optimizer.state_dict()  # waits for updates: from now on the main thread issues
        with monkeypatch.context() as patch:
            patch.setattr(BufferPool, name, _failing(getattr(BufferPool, name), at, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                train(training, (1,))
        training[1].zero_grad()
        check_goes_on(training, undisturbed, 2, where=f"{name} {at}")
        assert_same(states(*training), states(*undisturbed), where=f"{name} {at}")


def test_out_of_memory_in_a_fetch_leaves_nothing_without_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is kept, and backward is called again."""
    norms = []
    model, optimizer = narrow(Spec("none", "least", (SWAP,)))
    for at in (0, 1, 3, 5):
        torch.manual_seed(3)
        loss = default_loss(model, DATA[0])
        if at:
            with monkeypatch.context() as patch:
                patch.setattr(swap, "torch", _Short(at))
                with pytest.raises(torch.OutOfMemoryError):
                    loss.backward(retain_graph=True)
            optimizer.zero_grad()
        loss.backward()
        norms.append(optimizer.clip_grad_norm_(1e9).item())
        optimizer.zero_grad()
    assert norms == norms[:1] * 4


@pytest.mark.parametrize("buffers", ["least", "all"])
@pytest.mark.parametrize("where", ["before a block", "after a block", "inside a block"])
def test_what_a_running_forward_holds_is_not_let_go(where: str, buffers: str) -> None:
    """A hook that saves, or looks at the loss, runs while units hold chunks that no interrupt has left."""
    model, optimizer = narrow(Spec("none", buffers, (NONE,), small=True))
    block: Any = model.get_submodule("blocks.1")
    done: list[Any] = []

    def act(*_: Any) -> None:
        if not done:
            done.append(model.state_dict())
            done.append(optimizer.state_dict())
            if buffers == "all":  # otherwise there is no room for a second unit's
                with torch.no_grad():
                    done.append(default_loss(model, DATA[2]))

    if where == "before a block":
        block.register_forward_pre_hook(act)
    else:
        (block if where == "after a block" else block.drop).register_forward_hook(act)
    losses = train((model, optimizer), (0, 1, 2))
    assert done
    if buffers == "least":  # what is drawn at random in the forward of the hook changes the rest
        plain = narrow(Spec("none", buffers, (NONE,), small=True))
        assert losses == train(plain, (0, 1, 2))
        assert_same(states(model, optimizer), states(*plain))


class _Short:
    """torch, whose ``empty`` fails at one of its calls."""

    def __init__(self, at: int) -> None:
        self.empty = _failing(torch.empty, at, torch.OutOfMemoryError("out of memory"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _failing(function: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    calls = iter(range(1, sys.maxsize))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise error
        return function(*args, **options)

    return call
