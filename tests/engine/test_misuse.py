"""Misuse of a wrapped model or optimizer: one clear error that names the thing and the remedy, and nothing is lost."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.errors import BudgetError, MisuseError, PlanError
from protrain.optim import ProTrainOptimizer
from tests.engine.harness import CKPT, NONE, SWAP, Spec, adamw, assert_same, states, wrap_under

CPU = torch.device("cpu")
OFFLOADED = Spec("none", "least", (NONE, CKPT, SWAP))
MIXED = Spec("some", "least", (SWAP, CKPT, NONE))
RESIDENT = Spec("all", "least", (NONE,))
Batch = dict[str, Tensor]
Wrapped = tuple[nn.Module, ProTrainOptimizer]
Wrap = Callable[..., Wrapped]


@pytest.fixture
def batch(tiny_batch: Callable[..., Batch]) -> Batch:
    return tiny_batch()


@pytest.fixture
def wrapped(tiny_model: Callable[..., nn.Module], batch: Batch) -> Wrap:
    """``wrapped(spec=OFFLOADED, **options)``: a tiny LLaMA and its optimizer, wrapped; always the same weights."""

    def build(spec: Spec = OFFLOADED, **options: Any) -> Wrapped:
        model = tiny_model("llama")
        return wrap_under(spec, model, adamw(model), batch, device=CPU, **options)

    return build


def train(model: nn.Module, optimizer: ProTrainOptimizer, batch: Batch, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(**batch).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def assert_unharmed(found: Wrapped, untouched: Wrapped, batch: Batch) -> None:
    """``found`` goes on exactly as a model to which nothing happened."""
    assert train(*found, batch, steps=2) == train(*untouched, batch, steps=2)
    assert_same(states(*found), states(*untouched))


# -- the optimizer's methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_step_and_clip_need_a_backward(wrapped: Wrap, batch: Batch, spec: Spec) -> None:
    model, optimizer = wrapped(spec)
    for call, name in ((optimizer.step, "step"), (lambda: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_")):
        with pytest.raises(MisuseError, match=rf"{name}\(\) without gradients: call loss.backward\(\) first"):
            call()
    model(**batch).loss.backward()
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match="without gradients"):
        optimizer.step()
    assert_unharmed((model, optimizer), wrapped(spec), batch)


def test_groups_are_fixed_by_wrapping(wrapped: Wrap, batch: Batch) -> None:
    model, optimizer = wrapped()
    with pytest.raises(MisuseError, match=r"cannot be added after protrain.wrap: make the optimizer with all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert_unharmed((model, optimizer), wrapped(), batch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_norm": 0.0}, "max_norm must be a positive number, not 0.0"),
        ({"max_norm": -1.0}, "max_norm must be a positive number, not -1.0"),
        ({"max_norm": float("nan")}, "max_norm must be a positive number, not nan"),
        ({"max_norm": 1.0, "norm_type": float("inf")}, "norm_type must be 2.0, not inf"),
    ],
)
def test_clip_refuses_what_it_cannot_do(wrapped: Wrap, batch: Batch, arguments: Any, words: str) -> None:
    model, optimizer = wrapped()
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match=words):
        optimizer.clip_grad_norm_(**arguments)
    optimizer.zero_grad()
    assert_unharmed((model, optimizer), wrapped(), batch)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_nonfinite_gradients_are_an_error_on_request(wrapped: Wrap, batch: Batch, value: float, spec: Spec) -> None:
    model, optimizer = wrapped(spec)
    (model(**batch).loss * value).backward()
    with pytest.raises(RuntimeError, match=r"norm of the gradients is (nan|inf), so they cannot be clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.zero_grad()
    assert_unharmed((model, optimizer), wrapped(spec), batch)


@pytest.mark.parametrize("during_backward", [False, True])
@pytest.mark.parametrize("learning_rate", [-1.0, float("nan")])
def test_a_wrong_learning_rate_leaves_no_half_step_behind(
    wrapped: Wrap, batch: Batch, learning_rate: float, during_backward: bool
) -> None:
    model, optimizer = wrapped(MIXED, step_during_backward=during_backward)
    right = optimizer.param_groups[1]["lr"]
    optimizer.param_groups[1]["lr"] = learning_rate  # of the second group: chunks of the first one come before
    with pytest.raises(ValueError, match="lr must be finite and at least 0, not"):
        train(model, optimizer, batch)
    optimizer.param_groups[1]["lr"] = right
    optimizer.zero_grad()
    assert_unharmed((model, optimizer), wrapped(MIXED), batch)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_larger_batch_is_refused_and_a_smaller_one_trains(
    wrapped: Wrap, batch: Batch, tiny_batch: Callable[..., Batch]
) -> None:
    model, optimizer = wrapped()
    for larger in (tiny_batch(batch=3), tiny_batch(sequence=17)):
        shape = tuple(larger["input_ids"].shape)
        with pytest.raises(MisuseError, match=r"larger than the .* plan was made for.*example_batch") as caught:
            model(**larger)
        assert str(shape) in str(caught.value)
        assert "(2, 16)" in str(caught.value)
    first, second = train(model, optimizer, tiny_batch(batch=1, sequence=9), steps=2)
    assert second < first
    with torch.no_grad():  # keeps nothing for a backward, so the plan says nothing about it
        assert model(**tiny_batch(batch=3)).logits.shape[0] == 3


def test_as_many_tokens_in_longer_sequences_are_refused(wrapped: Wrap, tiny_batch: Callable[..., Batch]) -> None:
    model, optimizer = wrapped()
    longer, shorter = tiny_batch(batch=1, sequence=32), tiny_batch(batch=4, sequence=8)
    words = r"input_ids has shape \(1, 32\), longer in dimension 1 than the \(2, 16\) .* as long in every dimension"
    for call in (lambda: model(**longer), lambda: model(longer["input_ids"], labels=longer["labels"])):
        with pytest.raises(MisuseError, match=words):
            call()
    first, second = train(model, optimizer, shorter, steps=2)
    assert second < first


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2))

    def forward(self, inputs: dict[str, list[Tensor]]) -> Tensor:
        (x,) = inputs["x"]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_where_sequences_come_first_no_dimension_may_be_longer() -> None:
    def inputs(*shape: int) -> tuple[dict[str, list[Tensor]]]:
        return ({"x": [torch.randn(*shape)]},)

    model: nn.Module = SequenceFirst()
    model, _ = wrap_under(OFFLOADED, model, adamw(model), inputs(16, 2, 8), device=CPU)
    for shape, dimension in (((32, 1, 8), 0), ((8, 4, 8), 1)):
        with pytest.raises(MisuseError, match=rf"inputs\.x\.0 .* longer in dimension {dimension} than the \(16, 2"):
            model(*inputs(*shape))
    model(inputs=inputs(9, 2, 8)[0]).backward()


def test_a_larger_positional_batch_is_refused() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    model = make()
    small, large = torch.randn(4, 8), torch.randn(5, 8)
    model, optimizer = wrap_under(Spec("none", "least", (NONE,)), model, adamw(model), (small,), device=CPU)
    with pytest.raises(MisuseError, match=r"\(5, 8\), larger than the \(4, 8\)"):
        model(large)
    model(small).square().mean().backward()
    optimizer.step()


# -- gradients and parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, MIXED, OFFLOADED], ids=str)
def test_gradients_of_parameters_say_where_they_are(wrapped: Wrap, batch: Batch, spec: Spec) -> None:
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
    assert_unharmed((model, optimizer), wrapped(spec), batch)


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


OPERATIONS: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul": lambda p: p * 2,
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "add_": lambda p: p.add_(1),
    "tolist": lambda p: p.tolist(),
    "getitem": lambda p: p[0],
    "stack": lambda p: torch.stack([torch.zeros(p.shape), p]),
    "linear": lambda p: nn.functional.linear(torch.zeros(2, p.shape[1]), p),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_released_parameter_has_no_values_outside_its_module(wrapped: Wrap, batch: Batch, operation: str) -> None:
    model, optimizer = wrapped()
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = model.get_parameter(name)
    assert (tuple(parameter.shape), parameter.dtype, parameter.requires_grad) == ((64, 32), torch.float32, True)
    assert parameter.numel() == parameter.nelement() == 2048
    with pytest.raises(MisuseError, match=rf"{name} is not on the device here .*full_parameters\(model\)"):
        OPERATIONS[operation](parameter)
    with protrain.full_parameters(model):
        assert torch.isfinite(parameter).all()
    assert_unharmed((model, optimizer), wrapped(), batch)


@pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)
def test_a_wrapped_model_stays_where_it_is(wrapped: Wrap, batch: Batch, spec: Spec) -> None:
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
    with pytest.raises(MisuseError, match=r"cannot be copied or pickled whole: use model.state_dict\(\)"):
        copy.deepcopy(model)
    assert_unharmed((model, optimizer), wrapped(spec), batch)


# -- the graph ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [RESIDENT, MIXED, OFFLOADED], ids=str)
def test_backward_after_step_is_refused(wrapped: Wrap, batch: Batch, spec: Spec) -> None:
    def after_a_step() -> tuple[Wrapped, Tensor]:
        model, optimizer = wrapped(spec)
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        return (model, optimizer), loss

    found, loss = after_a_step()
    with pytest.raises(MisuseError, match=r"after optimizer.step\(\) changed its weights: call backward\(\) before"):
        loss.backward()
    found[1].zero_grad()
    assert_unharmed(found, after_a_step()[0], batch)


def test_a_backward_that_fails_half_way_leaves_nothing(wrapped: Wrap, batch: Batch) -> None:
    model, optimizer = wrapped()

    def fail(_: Tensor) -> None:
        raise ArithmeticError("a hook of the user")

    handle = model.get_submodule("model.layers.1").register_forward_hook(lambda *a: a[2].register_hook(fail) and None)
    with pytest.raises(ArithmeticError, match="a hook of the user"):
        model(**batch).loss.backward()
    handle.remove()
    optimizer.zero_grad()
    assert_unharmed((model, optimizer), wrapped(), batch)


# -- float16 -----------------------------------------------------------------------------------------------------------


def test_float16_needs_the_optimizers_backward(wrapped: Wrap, batch: Batch) -> None:
    model, optimizer = wrapped(dtype=torch.float16)
    loss = model(**batch).loss
    with pytest.raises(MisuseError, match=r"call optimizer.backward\(loss\) in place of loss.backward\(\)"):
        loss.backward()
    assert_unharmed((model, optimizer), wrapped(dtype=torch.float16), batch)


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


# -- budgets while running ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [(NONE,), (CKPT,)], ids=["none", "ckpt"])
def test_more_forwards_than_the_device_has_room_for(wrapped: Wrap, batch: Batch, modes: Any) -> None:
    spec = Spec("none", "least", modes)
    model, optimizer = wrapped(spec, tight=True)
    losses: list[Tensor] = []
    with pytest.raises(BudgetError, match=r"simulated device is full.*call backward\(\) before the next forward"):
        losses.extend(model(**batch).loss for _ in range(20))
    losses.clear()
    assert_unharmed((model, optimizer), wrapped(spec), batch)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_that_the_host_has_no_room_for(dtype: torch.dtype) -> None:
    def backward(model: nn.Module) -> None:
        model(*inputs).float().square().mean().backward()

    inputs = (torch.randn(4, 256, generator=torch.Generator().manual_seed(0)),)
    roomy, tight = roomy_and_tight(256, 4, Spec("none", "least", (NONE,)), inputs, dtype)
    backward(tight[0])
    with pytest.raises(PlanError, match=r"host.*fp32 accumulators.*pass their number as accumulation= to protrain"):
        backward(tight[0])
    tight[1].zero_grad()
    for model, optimizer in (roomy, tight):
        backward(model)
        optimizer.step()
    assert_same(states(*tight), states(*roomy))


def test_replaced_data_of_a_parameter_is_refused(wrapped: Wrap, batch: Batch) -> None:
    model, optimizer = wrapped(RESIDENT)
    train(model, optimizer, batch)
    weight = model.get_parameter("model.norm.weight")
    kept = weight.data
    weight.data = kept + 1
    with pytest.raises(MisuseError, match=r"data of model\.norm\.weight was replaced .*full_parameters"):
        model(**batch)
    weight.data = kept.clone()  # the same values elsewhere do no harm
    untouched = wrapped(RESIDENT)
    train(*untouched, batch)
    assert_unharmed((model, optimizer), untouched, batch)
