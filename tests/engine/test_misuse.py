"""Misuse of a wrapped model or optimizer: one clear error that names the thing and the remedy, and nothing is lost."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.engine.streams import CudaStreams
from tests.engine.harness import CKPT, Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.residual import batches, make
from tests.engine.unharmed import CPU, MIXED, OFFLOADED, RESIDENT, Batch, Wrap, assert_unharmed, wrapper

Unharmed = Callable[..., None]


@pytest.fixture
def wrapped(tiny_model: Callable[..., nn.Module], batch: Batch) -> Wrap:
    return wrapper(tiny_model, batch)


@pytest.fixture
def unharmed(tiny_model: Callable[..., nn.Module], batch: Batch) -> Unharmed:
    """``unharmed(found, dtype=..., steps_before=...)``; see assert_unharmed."""
    return functools.partial(assert_unharmed, tiny_model=tiny_model, batch=batch)


# -- the optimizer's methods -------------------------------------------------------------------------------------------


def test_what_is_added_after_wrapping_is_left_alone_as_by_any_optimizer(
    wrapped: Wrap, unharmed: Unharmed, batch: Batch
) -> None:
    model, optimizer = wrapped()
    model.added = added = nn.Linear(3, 3)
    before = added.weight.detach().clone()
    (model(**batch).loss + added.weight.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(added.weight, before)
    assert added.weight.grad is not None, "another optimizer may train it"
    del model.added
    unharmed((model, optimizer), steps_before=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_norm": 0.0}, "max_norm must be a positive number, not 0.0"),
        ({"max_norm": -1.0}, "max_norm must be a positive number, not -1.0"),
        ({"max_norm": float("nan")}, "max_norm must be a positive number, not nan"),
        ({"max_norm": 1.0, "norm_type": float("inf")}, "norm_type must be 2.0, not inf"),
    ],
)
def test_clip_refuses_what_it_cannot_do(
    wrapped: Wrap, unharmed: Unharmed, batch: Batch, arguments: Any, words: str
) -> None:
    model, optimizer = wrapped()
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match=words):
        optimizer.clip_grad_norm_(**arguments)
    optimizer.zero_grad()
    unharmed((model, optimizer))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_nonfinite_gradients_are_an_error_on_request(
    wrapped: Wrap, unharmed: Unharmed, batch: Batch, value: float, spec: Spec
) -> None:
    model, optimizer = wrapped(spec)
    (model(**batch).loss * value).backward()
    with pytest.raises(RuntimeError, match=r"norm of the gradients is (nan|inf), so they cannot be clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    unharmed((model, optimizer))


# -- gradients and parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_a_wrapped_model_stays_where_it_is(wrapped: Wrap, unharmed: Unharmed, spec: Spec) -> None:
    model, optimizer = wrapped(spec)
    moves: list[Callable[[], nn.Module]] = [
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.get_submodule("model.layers.0").double(),
        lambda: model.to("meta"),
    ]
    for move in moves:
        with pytest.raises(MisuseError, match=r"cannot be moved from cpu in torch.float32.*pass device= and dtype="):
            move()
    assert model.to("cpu") is model
    assert model.float() is model
    for whole in (model, nn.ModuleDict({"held": model})):
        with pytest.raises(MisuseError, match=r"cannot be copied or pickled whole: use model.state_dict\(\)"):
            torch.save(whole, io.BytesIO())
    for copied in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
        with pytest.raises(
            MisuseError, match=r"cannot be copied or pickled whole.*\(EMA\) with protrain.AveragedWeights"
        ):
            copied(model)
    for part in (model, model.get_submodule("model.layers.0")):
        with pytest.raises(MisuseError, match=r"cannot share its memory .* give them model.state_dict\(\)"):
            part.share_memory()
    unharmed((model, optimizer))


# -- the graph ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, MIXED, OFFLOADED], ids=str)
def test_backward_after_step_is_refused(wrapped: Wrap, unharmed: Unharmed, batch: Batch, spec: Spec) -> None:
    model, optimizer = wrapped(spec)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match=r"after optimizer.step\(\), or an edit, .*: call backward\(\) before"):
        loss.backward()
    optimizer.zero_grad()
    unharmed((model, optimizer), steps_before=1)


def test_a_step_in_the_middle_of_a_blocks_backward_is_refused(wrapped: Wrap, batch: Batch) -> None:
    """The first block's: no other unit's backward follows that would tell."""
    model, optimizer = wrapped(RESIDENT)
    steps: list[None] = []

    def step(_: Tensor) -> None:
        steps.append(optimizer.step())

    model.get_parameter("model.layers.0.mlp.down_proj.weight").register_hook(step)
    with pytest.raises(MisuseError, match=r"backward through model.layers.0 after optimizer.step\(\)"):
        model(**batch).loss.backward()
    assert len(steps) == 1


# -- kernels of another stream than the one that copies are ordered with -----------------------------------------------


def test_forward_and_step_on_another_stream_are_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for misused in (False, True):
        model, spec = make(), Spec("none", "least", (CKPT,))
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device)
        streams = optimizer._engine.streams
        if not isinstance(streams, CudaStreams):  # as if it were
            named = CudaStreams.__new__(CudaStreams)
            vars(named).update(device=device, compute=SimpleNamespace(stream="compute"))
            monkeypatch.setattr(streams, "refuse_another", named.refuse_another)
            monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "compute")

        @contextmanager
        def another_stream() -> Iterator[None]:
            with monkeypatch.context() as patch:
                if device.type == "cuda":
                    with torch.cuda.stream(torch.cuda.Stream(device)):
                        yield
                else:
                    patch.setattr(torch.cuda, "current_stream", lambda _: "another")
                    yield

        torch.manual_seed(1)
        if misused:
            with another_stream(), pytest.raises(MisuseError, match="the current CUDA stream is not the one"):
                wrapped(*batches()[0])
        default_loss(wrapped, batches()[0]).backward()
        if misused:
            with another_stream(), pytest.raises(MisuseError, match=r"outside `with torch.cuda.stream\(...\)`"):
                optimizer.step()
        optimizer.step()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [False, True])
def test_backward_alone_may_be_called_on_another_stream(inside: bool) -> None:
    results = []
    cuda = torch.device("cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        model = make(width=1024)
        wrapped, optimizer = wrap_under(
            Spec("some", "least", (CKPT,)), model, adamw(model), batches()[0], device=cuda, step_during_backward=inside
        )
        for batch in batches():
            torch.manual_seed(1)
            loss = default_loss(wrapped, batch)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


def test_a_loss_of_float16_that_is_not_scaled_is_refused_and_leaves_nothing() -> None:
    results = []
    for refused in (False, True):
        model = make()
        wrapped, optimizer = wrap_under(OFFLOADED, model, adamw(model), batches()[0], device=CPU, dtype=torch.float16)
        torch.manual_seed(1)
        loss = default_loss(wrapped, batches()[1])
        if refused:
            with pytest.raises(MisuseError, match="float16 needs a scaled loss"):
                loss.backward(retain_graph=True)
        optimizer.backward(loss)
        optimizer.step()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])
