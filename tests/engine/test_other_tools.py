"""What scripts and libraries do to a model that was wrapped, or will be: the plain results, or a named error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import CKPT, NONE, Spec, adamw, assert_same, default_loss, states, wrap_under
from tests.engine.residual import batches, make

RESIDENT = Spec("all", "least", (NONE,))
OFFLOADED = Spec("none", "least", (CKPT, NONE))
BOTH = pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses and norms of torch's own loop."""
    torch.manual_seed(1)
    values = []
    for batch in batches(steps):
        loss = default_loss(model, tuple(tensor.to(next(model.parameters()).device) for tensor in batch))
        loss.backward()
        values += [float(loss.detach()), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return values


# -- hooks on parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@BOTH
def test_hooks_that_come_after_wrap_see_the_gradients_of_the_plain_loop(
    spec: Spec, kind: str, device: torch.device
) -> None:
    """As watchers of gradients do: by the gradient itself, or by ``.grad`` once it is there."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        seen: dict[str, float] = {}

        def hook(name: str) -> Callable[[Any], None]:
            def see(tensor: Any) -> None:
                gradient = tensor if kind == "register_hook" else tensor.grad
                seen[name] = float(gradient.double().norm())

            return see

        handles = [getattr(p, kind)(hook(name)) for name, p in model.named_parameters()]
        losses = train(model, optimizer, 2)
        for handle in handles[1:]:
            handle.remove()
        norms = [seen[name] for name, _ in model.named_parameters()]
        seen.clear()
        losses += train(model, optimizer, 1)
        assert list(seen) == ["enter.weight"]
        return [*losses, *norms]

    plain, model = make().to(device), make()
    expected = run(plain, adamw(plain))
    assert run(*wrap_under(spec, model, adamw(model), batches()[0], device=device)) == pytest.approx(expected, rel=1e-4)


@BOTH
def test_the_place_of_a_parameter_in_the_graph(spec: Spec, device: torch.device) -> None:
    """Autograd finds it by a view of the parameter: for a hook on several gradients, and for a gradient of its own."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        parameters = [model.get_parameter("blocks.0.first.weight"), model.get_parameter("leave.bias")]
        handle = register_multi_grad_hook(parameters, seen.extend)
        losses = train(model, optimizer, 2)
        handle.remove()  # torch does not have it called by autograd.grad
        loss = default_loss(model, (batches()[0][0].to(device),))
        seen += torch.autograd.grad(loss, [get_gradient_edge(parameters[0])])
        return [*losses, *(float(gradient.double().norm()) for gradient in seen)]

    plain, model = make().to(device), make()
    expected = run(plain, adamw(plain))
    assert len(expected) == 2 * 2 + 2 * 2 + 1  # losses and norms, two gradients in each of two steps, and the last
    assert run(*wrap_under(spec, model, adamw(model), batches()[0], device=device)) == pytest.approx(expected, rel=1e-4)


# -- gradients that somebody else leaves -------------------------------------------------------------------------------


@BOTH
def test_a_gradient_that_something_else_put_there_is_refused(spec: Spec, device: torch.device) -> None:
    """DistributedDataParallel writes past Python into .grad, where no step looks."""
    words = r"something other than ProTrain has put a gradient into \.grad of enter\.weight.*DistributedDataParallel"
    model = make()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device)
    default_loss(wrapped, batches()[0]).backward()
    parameter: Any = wrapped.get_parameter("enter.weight")
    with torch._C.DisableTorchFunctionSubclass():
        raw: Any = torch.Tensor.grad
        raw.__set__(parameter, torch.zeros(parameter.shape, device=device))
    with pytest.raises(MisuseError, match=words):
        optimizer.step()
    with pytest.raises(MisuseError, match=words):
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
    parameter.grad = None
    optimizer.step()


# -- torch.compile -----------------------------------------------------------------------------------------------------


COMPILES: dict[str, Callable[[Any, Any], Any]] = {
    "the model": lambda model, batch: torch.compile(model)(*batch),
    "its method": lambda model, batch: (model.compile(), model(*batch)),
    "its forward": lambda model, batch: torch.compile(model.forward)(*batch),
    "a block": lambda model, batch: (model.blocks[1].compile(), model(*batch)),
    "the step": lambda model, batch: torch.compile(lambda: model(*batch).sum())(),
}


@pytest.mark.parametrize(
    ("compiles", "spec"), zip(COMPILES, (RESIDENT, OFFLOADED, OFFLOADED, RESIDENT, OFFLOADED), strict=True), ids=str
)
def test_torch_compile_after_wrap_names_what_to_use(spec: Spec, compiles: str, device: torch.device) -> None:
    model = make()
    wrapped, _ = wrap_under(spec, model, adamw(model), batches()[0], device=device)
    with pytest.raises(MisuseError, match=r"torch\.compile was given a model .*pass compile=True to protrain\.wrap"):
        COMPILES[compiles](wrapped, batches()[0])


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().mean())(x),
    "grad of weights": lambda model, x: torch.func.grad(
        lambda weights: torch.func.functional_call(model, weights, (x,)).square().mean()
    )({name: weight.detach().clone() for name, weight in model.named_parameters()}),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vmap": lambda model, x: torch.vmap(lambda row: model(row[None]), randomness="same")(x),
    "vmap of a block": lambda model, x: torch.vmap(model.get_submodule("blocks.0"), randomness="same")(x.repeat(1, 6)),
}


@BOTH
def test_transforms_of_the_model_are_refused_under_every_plan(spec: Spec, device: torch.device) -> None:
    found = []
    for misused in (False, True):
        model = make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=device)
        if misused:
            for transform in TRANSFORMS.values():
                with pytest.raises(MisuseError, match=r"inside a transform of torch\.func .* use torch\.auto"):
                    transform(wrapped, batches()[0][0].to(device))
        train(wrapped, optimizer, 1)
        found.append(states(wrapped, optimizer))
    assert_same(*found)


@pytest.mark.parametrize("which", ["the model", "its method", "a block"])
def test_what_is_compiled_before_wrap_is_refused(which: str) -> None:
    model: Any = make()
    if which == "the model":
        model = torch.compile(model)
    else:
        (model if which == "its method" else model.blocks[1]).compile()
    with pytest.raises(ValueError, match=r"is compiled by torch\.compile.*as it was before, and compile=True"):
        protrain.wrap(model, adamw(model), example_batch=batches()[0], device="cpu", progress=False)


# -- Accelerate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
@BOTH
def test_accelerate_prepares_and_unwraps(spec: Spec, precision: str) -> None:
    """It would put autocast around the model's forward, but precision is the dtype that wrap was given."""
    accelerate = pytest.importorskip("accelerate")

    def run(model: nn.Module, optimizer: Any, precision: str) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        torch.manual_seed(1)
        prepared, stepper = accelerator.prepare(model, optimizer)
        values = []
        for number, batch in enumerate(batches(4)):
            if number == 2:
                accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
            loss = default_loss(prepared, batch)
            accelerator.backward(loss)
            values += [float(loss.detach()), float(accelerator.clip_grad_norm_(prepared.parameters(), 1.0))]
            stepper.step()
            stepper.zero_grad()
        return values

    plain, model = make(), make()
    expected = run(plain, adamw(plain), "no")
    wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=torch.device("cpu"))
    assert run(wrapped, optimizer, precision) == pytest.approx(expected, rel=1e-5)
    assert all(value.isfinite().all() for value in states(wrapped, optimizer).values())


def test_what_was_prepared_before_wrap_is_refused_by_name() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    model = make()
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(model, adamw(model))
    with pytest.raises(ValueError, match=r"not AcceleratedOptimizer of .*: .*Wrap first.*prepare"):
        protrain.wrap(prepared, optimizer, example_batch=batches()[0], device="cpu", progress=False)
