"""What scripts and libraries do to a model that was wrapped, or will be: the plain results, or a named error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.errors import MisuseError
from tests.engine.harness import Spec, adamw, check_equal_to_plain, default_loss
from tests.engine.residual import batches, make, unharmed, wrapped

RESIDENT = Spec("all", "least", "n")
OFFLOADED = Spec("none", "least", "cn")
BOTH = pytest.mark.parametrize("spec", [RESIDENT, OFFLOADED], ids=str)


# -- gradients that somebody else leaves -------------------------------------------------------------------------------


@BOTH
def test_a_gradient_that_something_else_put_there_is_refused(spec: Spec, device: torch.device) -> None:
    """DistributedDataParallel writes past Python into .grad, where no step looks."""
    words = r"something other than ProTrain has put a gradient into \.grad of enter\.weight.*DistributedDataParallel"
    model, optimizer = wrapped(spec, device=device)
    default_loss(model, batches()[0]).backward()
    parameter: Any = model.get_parameter("enter.weight")
    with torch._C.DisableTorchFunctionSubclass():
        raw: Any = torch.Tensor.grad
        raw.__set__(parameter, torch.zeros(parameter.shape, device=device))
    with pytest.raises(MisuseError, match=words):
        optimizer.step()
    with pytest.raises(MisuseError, match=words):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    model, _ = wrapped(spec, device=device)
    with pytest.raises(MisuseError, match=r"torch\.compile was given a model .*pass compile=True to protrain\.wrap"):
        COMPILES[compiles](model, batches()[0])


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).square().mean())(x),
    "grad of weights": lambda model, x: torch.func.grad(
        lambda weights: torch.func.functional_call(model, weights, (x,)).square().mean()
    )({name: weight.detach().clone() for name, weight in model.named_parameters()}),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vmap of a block": lambda model, x: torch.vmap(model.get_submodule("blocks.0"), randomness="same")(x.repeat(1, 6)),
}


@BOTH
def test_transforms_of_the_model_are_refused_under_every_plan(spec: Spec, device: torch.device) -> None:
    with unharmed(spec, device=device) as (model, _):
        for transform in TRANSFORMS.values():
            with pytest.raises(MisuseError, match=r"inside a transform of torch\.func .* use torch\.auto"):
                transform(model, batches()[0][0].to(device))


# -- Accelerate, and weights that it moves about -----------------------------------------------------------------------

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")


def test_what_was_prepared_before_wrap_is_refused_by_name() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    model = make()
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(model, adamw(model))
    with pytest.raises(ValueError, match=r"not AcceleratedOptimizer of .*: .*Wrap first.*prepare"):
        protrain.wrap(prepared, optimizer, example_batch=batches()[0], device="cpu", progress=False)


def disk_offload(model: nn.Module, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device="cpu")


def two_hooks(model: nn.Module, _: Path) -> Any:
    hooks.add_hook_to_module(model.get_submodule("leave"), hooks.ModelHook())
    offloading = hooks.AlignDevicesHook(execution_device="cpu", offload=True)
    hooks.add_hook_to_module(model.get_submodule("leave"), offloading, append=True)
    return model


@pytest.mark.parametrize("dispatch", [disk_offload, two_hooks])
def test_offloaded_models_are_refused_and_train_when_their_weights_are_back(
    dispatch: Callable[[nn.Module, Path], Any], tmp_path: Path
) -> None:
    def build() -> nn.Module:
        model: nn.Module = dispatch(make(), tmp_path)
        words = r"has a hook of accelerate \(\w+\) that fetches its weights.*without device_map.*remove_hook_"
        with pytest.raises(ValueError, match=words):
            protrain.wrap(model, adamw(model), example_batch=batches()[0], device="cpu", progress=False)
        hooks.remove_hook_from_submodules(model)
        return model

    check_equal_to_plain(build, batches(3), make_plain=make, specs=[OFFLOADED])
