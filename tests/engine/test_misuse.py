"""Misuse of a wrapped model or optimizer: one clear error that names the thing and the remedy, and nothing is lost."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import Spec, assert_same, states
from tests.engine.unharmed import MIXED, OFFLOADED, RESIDENT, Batch, Wrap, assert_unharmed, train, wrapper

Unharmed = Callable[..., None]


@pytest.fixture
def wrapped(tiny_model: Callable[..., nn.Module], batch: Batch) -> Wrap:
    return wrapper(tiny_model, batch)


@pytest.fixture
def unharmed(tiny_model: Callable[..., nn.Module], batch: Batch) -> Unharmed:
    """``unharmed(found, dtype=..., steps_before=...)``; see assert_unharmed."""
    return functools.partial(assert_unharmed, tiny_model=tiny_model, batch=batch)


# -- the optimizer's methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_step_and_clip_need_a_backward(wrapped: Wrap, unharmed: Unharmed, batch: Batch, spec: Spec) -> None:
    model, optimizer = wrapped(spec)
    for call, name in ((optimizer.step, "step"), (lambda: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_")):
        with pytest.raises(MisuseError, match=rf"{name}\(\) without gradients: call loss.backward\(\) first"):
            call()
    model(**batch).loss.backward()
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match="without gradients"):
        optimizer.step()
    unharmed((model, optimizer))


def test_groups_are_fixed_by_wrapping(wrapped: Wrap, unharmed: Unharmed) -> None:
    model, optimizer = wrapped()
    with pytest.raises(MisuseError, match=r"cannot be added after protrain.wrap: make the optimizer with all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    unharmed((model, optimizer))


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


@pytest.mark.parametrize("during_backward", [False, True])
@pytest.mark.parametrize("learning_rate", [-1.0, float("nan")])
def test_a_wrong_learning_rate_leaves_no_half_step_behind(
    wrapped: Wrap, unharmed: Unharmed, batch: Batch, learning_rate: float, during_backward: bool
) -> None:
    model, optimizer = wrapped(MIXED, step_during_backward=during_backward)
    right = optimizer.param_groups[1]["lr"]
    optimizer.param_groups[1]["lr"] = learning_rate  # of the second group: chunks of the first one come before
    with pytest.raises(ValueError, match="lr must be finite and at least 0, not"):
        train(model, optimizer, batch)
    optimizer.param_groups[1]["lr"] = right
    optimizer.zero_grad()
    unharmed((model, optimizer))


# -- gradients and parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, MIXED, OFFLOADED], ids=str)
def test_gradients_of_parameters_say_where_they_are(
    wrapped: Wrap, unharmed: Unharmed, batch: Batch, spec: Spec
) -> None:
    model, optimizer = wrapped(spec)
    for parameter in model.parameters():
        assert parameter.grad is None
        parameter.grad = None
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        with pytest.raises(MisuseError, match=f"{name} is kept in ProTrain's chunks and cannot be assigned"):
            parameter.grad = torch.zeros(parameter.shape)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    unharmed((model, optimizer))


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_gradients_that_are_used_up_are_not_taken_for_none(wrapped: Wrap, batch: Batch, spec: Spec) -> None:
    model, optimizer = wrapped(spec, step_during_backward=True)
    model(**batch).loss.backward()
    with pytest.raises(MisuseError, match=r"made inside backward\. To clip or read gradients wrap with step_during_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_in_the_guise_of_another(wrapped: Wrap, batch: Batch) -> None:
    """Lightning's and Fabric's take the class of the one that they hold, and its methods with it."""

    class Guise:
        def __init__(self, optimizer: ProTrainOptimizer) -> None:
            self._held = optimizer
            self.__class__ = type("Guise", (type(self), type(optimizer)), {})

        def step(self) -> None:
            self._held.step()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._held, name)

    found = []
    for make in (lambda optimizer: optimizer, Guise):
        model, optimizer = wrapped(MIXED, dtype=torch.float16)
        used: Any = make(optimizer)
        used.backward(model(**batch).loss)
        used.clip_grad_norm_(1e-3)
        with pytest.raises(MisuseError, match="clip once"):
            used.backward(model(**batch).loss)
        used.zero_grad()
        used.backward(model(**batch).loss)
        used.clip_grad_norm_(1e-3)
        used.step()
        found.append(states(model, optimizer))
    assert_same(*found)


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


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_zeros_in_place_of_gradients_count_where_backward_reaches_all(
    wrapped: Wrap, unharmed: Unharmed, batch: Batch, spec: Spec
) -> None:
    """In torch zero_grad(set_to_none=False) leaves zeros, with which Adam moves on what backward does not reach."""
    model, optimizer = wrapped(spec)
    frozen = model.get_submodule("model.layers.1")
    for is_trained in (True, True, False):
        frozen.requires_grad_(is_trained)
        model(**batch).loss.backward()
        if is_trained:
            optimizer.step()
        else:
            with pytest.raises(MisuseError, match=r"reached model\.layers\.1\..* call zero_grad\(\) without set_to"):
                optimizer.step()
        model.zero_grad(set_to_none=False)
    frozen.requires_grad_()
    unharmed((model, optimizer), steps_before=2)


def test_zeros_of_a_step_that_was_given_up_count_too(wrapped: Wrap, unharmed: Unharmed, batch: Batch) -> None:
    """torch decays a weight whose gradient is zeros, though no step came before."""
    model, optimizer = wrapped(OFFLOADED)
    model(**batch).loss.backward()
    optimizer.zero_grad(set_to_none=False)
    model.get_parameter("model.norm.weight").square().sum().backward()
    with pytest.raises(
        MisuseError, match=r"no backward\(\) has reached .* call zero_grad\(\) without set_to_none=False"
    ):
        optimizer.step()
    optimizer.zero_grad()
    unharmed((model, optimizer))


def test_zeros_in_place_of_no_gradients_are_none(wrapped: Wrap, batch: Batch) -> None:
    """A parameter that had a gradient in an earlier step has none when zero_grad is called, so torch leaves none."""
    model, optimizer = wrapped(OFFLOADED)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    model.get_parameter("model.norm.weight").square().sum().backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1, 2}


def test_zeros_where_backward_uses_gradients_up(wrapped: Wrap, unharmed: Unharmed, batch: Batch) -> None:
    model, optimizer = wrapped(MIXED, step_during_backward=True)
    with pytest.raises(MisuseError, match=r"call zero_grad\(\) without set_to_none=False"):
        optimizer.zero_grad(set_to_none=False)
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


# -- float16 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_a_float16_overflow_skips_the_step_and_halves_the_scale(wrapped: Wrap, batch: Batch, spec: Spec) -> None:
    model, optimizer = wrapped(spec, dtype=torch.float16)
    train(model, optimizer, batch)
    before = states(model, optimizer)
    assert optimizer.scalar_state()["loss_scale"]["scale"] == 2.0**16
    optimizer.backward(model(**batch).loss * 1e6)
    assert not torch.isfinite(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.scalar_state()["loss_scale"] == {"scale": 2.0**15, "finite_steps": 0, "skipped": 1}
    assert optimizer.skipped_steps == 1
    after = states(model, optimizer)
    assert after.pop("skipped steps") == before.pop("skipped steps") + 1
    assert_same(after, before)
    first, second = train(model, optimizer, batch, steps=2)
    assert second < first
    assert optimizer.skipped_steps == 1
