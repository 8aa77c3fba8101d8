"""What the kernels are measured against: idiomatic torch, the same compiled, and other packages where installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import pytest
import torch

from bench.kernels.recorder import Recorder

Made = TypeVar("Made")


def compiled(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` through torch.compile, specialised on its shapes; skips the test where nothing is timed."""
    if not recorder.timed:
        pytest.skip("torch.compile takes long and is compared on a GPU alone")
    torch._dynamo.reset()  # shapes of earlier rows would make this one dynamic
    return torch.compile(function, dynamic=False, fullgraph=True)


def installed(package: str, module: str) -> tuple[Any, str]:
    """(the module, the package's version); skips the test where it isn't installed or doesn't load."""
    try:
        found = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    try:
        return importlib.import_module(module), found
    except Exception as error:  # these packages build code at import, and fail in many ways
        pytest.skip(f"{package} {found} doesn't load: {' '.join(str(error).split())[:200]}")


def built(name: str, make: Callable[[], Made]) -> Made:
    """``make()``, which compiles code, for this GPU alone; skips the test, saying why, when it fails."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            # DeepSpeed cannot read what NVIDIA's images set here, such as 9.0a.
            patch.setenv("TORCH_CUDA_ARCH_LIST", "{}.{}".format(*torch.cuda.get_device_capability()))
        try:
            return make()
        except Exception as error:  # compilers fail in many ways
            pytest.skip(f"{name} doesn't build: {' '.join(str(error).split())[:200]}")


def same_bits(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """AssertionError unless the two hold the same bits; a NaN equals any NaN."""
    if found.dtype.is_floating_point:
        integers = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
        equal = (found.view(integers) == wanted.view(integers)) | (found.isnan() & wanted.isnan())
    else:
        equal = found == wanted
    wrong = int((~equal).sum())
    assert wrong == 0, f"{name}: {wrong} of {found.numel()} elements differ from the reference"


def close(name: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> float:
    """The relative error of ``found``, ‖found − wanted‖ / ‖wanted‖. AssertionError when it is above ``tolerance``."""
    difference = (found.double() - wanted.double()).norm()
    error = float(difference / wanted.double().norm().clamp_min(1e-300))
    assert error <= tolerance, f"{name}: relative error {error:.2e}, above {tolerance:.0e}"
    return error
