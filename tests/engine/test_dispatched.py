"""Models whose weights accelerate moves about: refused where it does, and as any other where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from tests.engine import residual
from tests.engine.harness import CKPT, NONE, Loop, Spec, adamw, plain_run, states, wrap_under

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")

DEVICE = torch.device("cpu")
DATA = residual.batches(3)
MAP = {"enter": "cpu", **{f"blocks.{index}": "disk" if index == 1 else "cpu" for index in range(5)}, "leave": "cpu"}


def cpu_offload(model: nn.Module, _: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device="cpu")


def disk_offload(model: nn.Module, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device="cpu")


def partly_on_the_disk(model: nn.Module, folder: Path) -> Any:
    return accelerate.dispatch_model(model, MAP, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def two_hooks(model: nn.Module, _: Path) -> Any:
    hooks.add_hook_to_module(model.get_submodule("leave"), hooks.ModelHook())
    offloading = hooks.AlignDevicesHook(execution_device="cpu", offload=True)
    hooks.add_hook_to_module(model.get_submodule("leave"), offloading, append=True)
    return model


def refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        protrain.wrap(model, torch.optim.AdamW(model.parameters()), example_batch=DATA[0], device="cpu", progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dispatch", [cpu_offload, disk_offload, partly_on_the_disk, two_hooks])
def test_offloaded_models_are_refused_and_train_when_their_weights_are_back(
    dispatch: Callable[[nn.Module, Path], Any], tmp_path: Path
) -> None:
    expected, final = plain_run(residual.make, DATA, loop=Loop(), device=DEVICE, dtype=torch.float32)
    model = dispatch(residual.make(), tmp_path)
    refused(model, r"has a hook of accelerate \(\w+\) that fetches its weights.*without device_map.*remove_hook_")
    hooks.remove_hook_from_submodules(model)
    spec = Spec("none", "least", (CKPT, NONE))
    wrapped, optimizer = wrap_under(spec, model, adamw(model), DATA[0], device=DEVICE)
    assert Loop().run(wrapped, optimizer, DATA) == expected
    assert all(torch.equal(value, final[name]) for name, value in states(wrapped, optimizer).items())


def test_hooks_that_move_nothing_elsewhere_are_harmless() -> None:
    """As of models that are wholly on the device of the training, and of adapters."""

    def make() -> nn.Module:
        model = residual.make()
        hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True))
        for name in ("enter", "blocks.1"):
            hooks.add_hook_to_module(model.get_submodule(name), hooks.AlignDevicesHook(execution_device="cpu"))
        return model

    expected, _ = plain_run(residual.make, DATA, loop=Loop(), device=DEVICE, dtype=torch.float32)
    for modes in ((CKPT,), (NONE,)):
        model = make()
        wrapped, optimizer = wrap_under(Spec("none", "least", modes), model, adamw(model), DATA[0], device=DEVICE)
        assert Loop().run(wrapped, optimizer, DATA) == expected
