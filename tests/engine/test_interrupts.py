"""Ctrl-C, or no memory left, anywhere in forward and backward: after zero_grad() training goes on as if it hadn't been.

Silence is the worst that can happen: a buffer that is taken for a chunk that never came up, say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from protrain.engine.activations import swap
from protrain.engine.weights.buffers import BufferPool
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    NONE,
    SWAP,
    Calls,
    Spec,
    adamw,
    assert_same,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.residual import batches, make

CPU = torch.device("cpu")
DATA = batches(3)
SPECS = (
    Spec("none", "least", (NONE,), small=True),
    Spec("none", "least", (CKPT, SWAP), small=True, speculate=True),
    Spec("some", "least", (CKPT_SWAP, SWAP, NONE)),
)
POINTS = 8
Wrapped = tuple[nn.Module, ProTrainOptimizer]


def wrapped(spec: Spec) -> Wrapped:
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


def interrupted(training: Wrapped, calls: Calls) -> None:
    """One forward and backward under ``calls``, then what a notebook's user does."""
    torch.manual_seed(7)
    with suppress(KeyboardInterrupt), calls:
        default_loss(training[0], DATA[1]).backward()
    training[1].zero_grad()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer nobody sees it
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_training_goes_on_after_ctrl_c_anywhere(spec: Spec) -> None:
    training, undisturbed = wrapped(spec), wrapped(spec)
    check_goes_on(training, undisturbed, 0, where="before")
    calls = Calls(folder="engine")
    interrupted(training, calls)
    assert calls.made > 500
    check_goes_on(training, undisturbed, 1, where="without an interrupt")
    for point in range(POINTS):
        # Not at the same place of every unit.
        interrupted(training, Calls(at=1 + (calls.made * point // POINTS + 37 * point) % calls.made, folder="engine"))
        check_goes_on(training, undisturbed, point % 3, where=f"call {point} of {POINTS}")
    check_goes_on(training, undisturbed, 1, where="after the last")
    assert_same(states(*training), states(*undisturbed))


@pytest.mark.parametrize("buffers", ["least", "middle"])
@pytest.mark.parametrize("name", ["_issue", "_upload"])
def test_a_chunk_that_never_came_up_is_not_taken_for_there(
    buffers: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec("none", buffers, (NONE,), small=True)
    training, undisturbed = wrapped(spec), wrapped(spec)
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
    model, optimizer = wrapped(Spec("none", "least", (SWAP,)))
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
    model, optimizer = wrapped(Spec("none", buffers, (NONE,), small=True))
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
        plain = wrapped(Spec("none", buffers, (NONE,), small=True))
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
