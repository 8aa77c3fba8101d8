"""Ctrl-C, or no memory left, in the middle of a step: nothing is lost, and nothing is waited for for ever."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.engine.updates.updates import Updates
from tests.engine.harness import Calls, Loop, Spec, assert_same, default_loss, seeded, states
from tests.engine.residual import batches, wrapped

SPECS = (
    Spec("none", "least", "n", small=True),
    Spec("none", "least", "nc", small=True, speculate=True, weights=True),
    Spec("some", "least", "cn", small=True, speculate=True, stream=True),
)
POINTS = 16


def backward(model: nn.Module) -> None:
    with seeded():
        default_loss(model, batches()[1]).backward()


@pytest.mark.parametrize(("spec", "clipped"), [*zip(SPECS, (False, True, True), strict=True)], ids=str)
def test_a_step_is_carried_out_as_a_whole_or_not_at_all(spec: Spec, clipped: bool, device: torch.device) -> None:
    """One that was not carried out can be called again."""
    training, undisturbed = wrapped(spec, device=device), wrapped(spec, device=device)

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


def test_an_interrupt_at_the_end_of_a_backward_with_updates_inside_is_one_after_them(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Updates) -> None:
        raise KeyboardInterrupt

    training, other = (wrapped(SPECS[1], device=device, step_during_backward=True) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(Updates, "end_backward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            backward(training[0])
    with pytest.raises(MisuseError, match="before step"):
        backward(training[0])
    training[1].zero_grad()
    backward(other[0])
    other[1].step()
    other[1].zero_grad()
    assert_same(states(*training), states(*other))
    assert Loop().run(*training, batches(2)) == Loop().run(*other, batches(2))
