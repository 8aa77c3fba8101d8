"""Misuse, and more than the plan has room for: one error that names the thing and the remedy, and nothing is lost."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import BudgetError, MisuseError
from protrain.engine.streams import CudaStreams
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    FEW_PLANS,
    NONE,
    SWAP,
    Spec,
    Trainer,
    adamw,
    assert_same,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain
from tests.engine.residual import batches, make

CPU = torch.device("cpu")
OFFLOADED = Spec("none", "least", (NONE, CKPT, SWAP))
MIXED = Spec("some", "least", (SWAP, CKPT, NONE))
RESIDENT = Spec("all", "least", (NONE,))
Batch = dict[str, Tensor]
Wrapped = tuple[nn.Module, ProTrainOptimizer]
Wrap = Callable[..., Wrapped]
Unharmed = Callable[..., None]


@pytest.fixture
def wrapped(tiny_model: Callable[..., nn.Module], batch: Batch) -> Wrap:
    """``wrapped(spec=OFFLOADED, **options)``: a tiny LLaMA and its optimizer, wrapped; always the same weights."""

    def wrap(spec: Spec = OFFLOADED, **options: Any) -> Wrapped:
        model = tiny_model("llama")
        return wrap_under(spec, model, adamw(model), batch, device=CPU, **options)

    return wrap


def train(model: nn.Module, optimizer: Trainer, batch: Batch, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


_outcomes: dict[int, tuple[list[float], dict[str, Tensor]]] = {}


@pytest.fixture
def unharmed(tiny_model: Callable[..., nn.Module], batch: Batch) -> Unharmed:
    """``unharmed(found, steps_before=0)``: it goes on as a tiny LLaMA to which nothing happened but these steps."""

    def check(found: Wrapped, *, steps_before: int = 0) -> None:
        if steps_before not in _outcomes:
            model = tiny_model("llama")
            plain = prepare_plain(model, adamw(model), device=CPU, dtype=torch.float32)
            train(*plain, batch, steps=steps_before)
            _outcomes[steps_before] = train(*plain, batch, steps=2), states(*plain)
        losses, final = _outcomes[steps_before]
        assert train(*found, batch, steps=2) == losses
        assert_same(states(*found), final)

    return check


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
            vars(named).update(device=device, compute="compute")
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


# -- batches -----------------------------------------------------------------------------------------------------------


def test_without_memory_for_it_a_larger_batch_is_refused_and_a_smaller_one_trains(
    wrapped: Wrap, batch: Batch, tiny_batch: Callable[..., Batch]
) -> None:
    model, optimizer = wrapped(Spec("none", "least", (CKPT,)), tight=True)
    for larger in (tiny_batch(batch=3), tiny_batch(sequence=17), tiny_batch(batch=1, sequence=32)):
        shape = tuple(larger["input_ids"].shape)
        words = r"^input_ids has .*larger than the \(2, 16\) that .* 0 B are free; .*as long in every dimension"
        for args, kwargs in (((), larger), ((larger["input_ids"],), {"labels": larger["labels"]})):
            with pytest.raises(MisuseError, match=words) as caught:
                model(*args, **kwargs)
            assert str(shape) in str(caught.value)
    first, second = train(model, optimizer, tiny_batch(batch=1, sequence=9), steps=2)
    assert second < first
    first, second = train(model, optimizer, tiny_batch(batch=4, sequence=8), steps=2)
    assert second < first
    with torch.no_grad():  # keeps nothing for a backward, so the plan says nothing about it
        assert model(**tiny_batch(batch=3)).logits.shape[0] == 3


# -- budgets while running ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [(NONE,), (CKPT,)], ids=["none", "ckpt"])
def test_more_forwards_than_the_device_has_room_for(
    wrapped: Wrap, unharmed: Unharmed, batch: Batch, modes: Any
) -> None:
    spec = Spec("none", "least", modes)
    model, optimizer = wrapped(spec, tight=True)
    losses: list[Tensor] = []
    with pytest.raises(BudgetError, match=r"simulated device is full.*call backward\(\) before the next forward"):
        losses.extend(model(**batch).loss for _ in range(20))
    losses.clear()
    unharmed((model, optimizer))


def sequential(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth))
    )


def roomy_and_tight(width: int, depth: int, spec: Spec, inputs: tuple[Tensor], dtype: torch.dtype) -> list[Wrapped]:
    """The same model twice under the same plan: with any host memory, and with no more than the plan takes."""
    model = sequential(width, depth)
    roomy = wrap_under(spec, model, adamw(model), inputs, device=CPU, dtype=dtype)
    plan = roomy[1].plan
    model = sequential(width, depth)
    tight = protrain.wrap(
        model,
        adamw(model),
        example_batch=inputs,
        device="cpu",
        dtype=dtype,
        plan=plan,
        device_memory="1GiB",
        host_memory=plan.host_bytes,
        progress=False,
    )
    return [roomy, tight]


def test_more_forwards_than_the_host_has_room_to_swap() -> None:
    inputs = (torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)),)
    roomy, tight = roomy_and_tight(64, 4, Spec("none", "least", (SWAP,)), inputs, torch.float32)
    kept: list[Tensor] = []
    with pytest.raises(BudgetError, match=r"no host memory to swap another .*call backward\(\) before the next"):
        kept.extend(tight[0](*inputs) for _ in range(20))
    kept.clear()
    for model, optimizer in (roomy, tight):
        for _ in range(2):
            model(*inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(states(*tight), states(*roomy))
    assert tight[1].report().host_bytes <= tight[1].plan.host_bytes


def test_no_sync_begins_a_sum_that_must_be_planned() -> None:
    model, data = residual.make(), residual.batches(1)
    wrapped, optimizer = wrap_under(FEW_PLANS[0], model, adamw(model), data[0], device=CPU)
    no_sync: Any = wrapped.no_sync
    with no_sync(), pytest.raises(MisuseError, match=r"under model.no_sync\(\) .*pass accumulation=2 or more"):
        default_loss(wrapped, data[0]).backward()
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
