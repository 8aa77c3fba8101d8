"""Errors and Ctrl-C in the middle of a step: what comes after them has the bits of a training without them."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.engine.harness import Calls
from tests.regressions.plain import Blocks, assert_same, both_plans, left, rows, same_bits, step, train, wrapped

both_errors = pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])


def raising(error: type[BaseException]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        raise error("a hook of the script")

    return hook


@same_bits(accumulation=2)
def test_a_backward_after_one_that_failed_adds_to_what_that_has_brought(
    model: nn.Module, optimizer: Any
) -> list[float]:
    """A backward that had failed made the next one leave out gradients or updates of some parameters."""
    first, second = model(rows(1)).square().mean(), model(rows(2)).square().mean()
    handle = model.get_parameter("blocks.1.2.bias").register_hook(raising(ArithmeticError))
    with pytest.raises(ArithmeticError):
        first.backward()
    handle.remove()
    model.zero_grad()
    step(optimizer, second)
    return train(model, optimizer)


@both_plans
@both_errors
def test_updates_inside_backward_go_on_after_one_that_failed(plan: str, error: type[BaseException]) -> None:
    """With step_during_backward=True a backward that had failed made the next one leave out updates."""

    found = []
    for fails in (False, True):
        model, optimizer = wrapped(plan, step_during_backward=True)
        step(optimizer, model(rows()).square().mean())
        if fails:  # before any update
            handle = model.get_submodule("blocks.3").register_full_backward_pre_hook(raising(error))
            with pytest.raises(error):
                step(optimizer, model(rows(1)).square().mean())
            handle.remove()
            optimizer.zero_grad()
        for seed in (2, 3):
            step(optimizer, model(rows(seed)).square().mean())
        found.append(left(model, optimizer))
    assert_same(*found)


@both_plans
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C may come in a finalizer
def test_ctrl_c_at_any_time_of_a_forward_or_backward_changes_nothing(plan: str) -> None:
    """A KeyboardInterrupt anywhere in a forward or backward, as a notebook's user makes it."""
    training, undisturbed = wrapped(plan), wrapped(plan)
    assert train(*training, 1) == train(*undisturbed, 1)
    calls = Calls()
    with calls:
        training[0](rows()).square().mean().backward()
    training[1].zero_grad()
    for number in range(20):
        with suppress(KeyboardInterrupt), Calls(at=1 + calls.made * number // 20):
            training[0](rows(number)).square().mean().backward()
        training[1].zero_grad()
        assert train(*training, 1, seed=number) == train(*undisturbed, 1, seed=number), number
    assert_same(left(*training), left(*undisturbed))


class Handled(Calls):
    """Lets ``handler`` run when the call comes, as Python runs the handler of a signal."""

    def __init__(self, handler: Callable[[], object], at: int) -> None:
        super().__init__(at)
        self.handler = handler

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        try:
            super().__call__(frame, event, argument)
        except KeyboardInterrupt:
            self.handler()


@both_plans
def test_a_signal_handler_that_reads_changes_nothing(plan: str) -> None:
    """A handler that saved at any time made the training hang or fail. It is refused where weights are on their way."""
    training, undisturbed = wrapped(plan), wrapped(plan)
    assert train(*training, 1) == train(*undisturbed, 1)
    calls, said = Calls(), set[str]()

    def read() -> None:
        try:
            left(*training)
            said.add("read")
        except protrain.MisuseError as error:
            said.add(str(error))

    with calls:
        train(*training, 1)
    train(*undisturbed, 1)
    for number in range(40):
        with Handled(read, 1 + calls.made * number // 40):
            values = train(*training, 1, seed=number)
        assert values == train(*undisturbed, 1, seed=number), number
    assert_same(left(*training), left(*undisturbed))
    refused = said - {"read"}
    assert "read" in said
    assert refused
    assert all("let the handler only set a flag" in each for each in refused)


@both_plans
def test_what_another_thread_reads_during_a_step_changes_nothing(plan: str) -> None:
    """It took the gradients of the backward that ran for those of one that had failed, and dropped them."""
    model, optimizer = wrapped(plan)
    said: list[str] = []

    def read() -> None:
        try:
            model.state_dict()
        except protrain.MisuseError as error:
            said.append(str(error))

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    handle = model.get_submodule("blocks.1").register_full_backward_hook(hook)
    values = train(model, optimizer)
    handle.remove()
    assert len(said) == 2
    assert all("give other threads copies" in each for each in said)
    undisturbed = wrapped(plan)
    assert values == train(*undisturbed)
    assert_same(left(model, optimizer), left(*undisturbed))


@both_plans
def test_autocast_is_off_after_an_error_in_a_forward(plan: str) -> None:
    """Autocast stayed on after an error in a forward."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model, optimizer = wrapped(plan)
    handle = model.get_submodule("blocks.1").register_forward_hook(raising(ArithmeticError))
    with pytest.raises(ArithmeticError), torch.autocast("cpu", dtype=torch.bfloat16):
        model(rows())
    handle.remove()
    assert not torch.is_autocast_enabled("cpu")
    assert train(model, optimizer) == train(*wrapped(plan))


class Failing(Blocks):
    """Its forward has an error, and values of all kinds in the frames around it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_parameter("blocks.0.0.weight")
        y = super().forward(x)
        raise ArithmeticError(f"{y.shape} after {weight.shape}")


def test_the_frames_of_an_error_in_the_first_forward_can_be_printed() -> None:
    """To print the frames of an error in the first forward, as pytest does, ended the process."""
    model = Failing()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ArithmeticError) as caught:
        protrain.wrap(model, optimizer, example_batch=rows(), device="cpu", progress=False)
    printed = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "weight = " in printed


@both_plans
def test_a_forked_process_says_what_it_lacks(plan: str) -> None:
    """A forked process that used a wrapped model waited for ever or was killed by the system."""
    model, optimizer = wrapped(plan)
    train(model, optimizer, 1)
    for use in (lambda: train(model, optimizer, 1), lambda: model.state_dict(), lambda: optimizer.state_dict()):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            said = "nothing"
            try:
                use()
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.read().startswith("MisuseError: this process was forked from the one that called protrain.wrap")
        os.waitpid(child, 0)
    assert train(model, optimizer, 2, seed=1) == train(*wrapped(plan), 3)[2:]


class _Left(torch.autograd.graph.saved_tensors_hooks):
    """Ctrl-C comes when the context is entered for the third time, just before Python knows how to leave it."""

    entered = 0

    def __enter__(self) -> None:
        super().__enter__()
        type(self).entered += 1
        if self.entered == 3:
            raise KeyboardInterrupt


@both_plans
def test_ctrl_c_while_hooks_of_saved_tensors_are_set_leaves_none(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks stayed, so that later blocks saved their tensors with one that had been interrupted."""
    training, undisturbed = wrapped(plan), wrapped(plan)
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    with monkeypatch.context() as patch:
        for module in ("protrain.engine.activations.saved", "protrain.forward.recomputation"):
            patch.setattr(f"{module}.saved_tensors_hooks", _Left)
        _Left.entered = 0
        with pytest.raises(KeyboardInterrupt):
            train(*training, 1)
    assert top(True) is not None
    training[0].zero_grad()
    assert train(*training) == train(*undisturbed)
    assert top(True) is None
    assert_same(left(*training), left(*undisturbed))


@both_plans
def test_ctrl_c_in_a_step_of_float16_does_not_count_it(plan: str) -> None:
    """A step that Ctrl-C had ended before it changed anything counted for the loss scale."""
    model, optimizer = wrapped(plan, dtype="float16")
    calls = Calls()
    for number in range(20):
        optimizer.backward(model(rows()).float().square().mean())  # in float32, as the scaled one is too large
        with suppress(KeyboardInterrupt), Calls(at=1 + calls.made * number // 20) if number else calls:
            optimizer.step()
        state = optimizer.state_dict()
        assert {int(each["step"]) for each in state["state"].values()} == {state["loss_scale"]["finite_steps"]}
        optimizer.zero_grad()
    assert state["loss_scale"]["finite_steps"] < 20
