"""The implementations that must agree: C, the torch fallback, and Triton (on a GPU, else in its interpreter)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from protrain_kernels import AdamStates, host_kernels, host_library
from protrain_kernels.adam import launch_adam
from protrain_kernels.flatten import launch_flatten, launch_unflatten, table_for
from protrain_kernels.fold import launch_fold
from protrain_kernels.fold import table_for as fold_table_for
from protrain_kernels.launch import launch
from tools.kernel_variants import variants


@dataclass(frozen=True)
class Backend:
    """Where a kernel runs."""

    name: str
    device: torch.device

    @property
    def interpreted(self) -> bool:
        return self.name == "triton" and self.device.type == "cpu"


def _launch_adam(states: AdamStates, grad: Any, scalars: Any, new: None, *, threads: int, **how: Any) -> bool:
    """``host_adam`` by the Triton kernel."""
    launch_adam(*states, grad, scalars, **how)
    return True


# What public functions call for tensors on the CPU, by module and name, and what the interpreter runs in its place.
_INTERPRETED: dict[tuple[str, str], Callable[..., object]] = {
    ("adam", "host_adam"): _launch_adam,
    ("flatten", "flatten_reference"): lambda tensors, chunk, offsets, partials, starts, squares, **how: launch_flatten(
        table_for(tensors, offsets, starts), tensors, chunk, partials, **how
    ),
    ("flatten", "unflatten_reference"): lambda chunk, tensors, offsets: launch_unflatten(
        table_for(tensors, offsets, None), chunk, tensors
    ),
    ("fold", "fold_reference"): lambda pieces, slices, squares, **how: launch_fold(
        fold_table_for(tuple(slices), pieces.device), pieces, **how
    ),
}


_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8"}
_TYPES |= {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
_OF_SIZES = {"RANKS", "UNROLL", "WORDS", "STRIDE", "SOFTCAP"}  # constants of which some values alone are compiled


def _choices(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> tuple[str, frozenset[Any]]:
    """What makes a launch another variant, whatever the sizes."""
    chosen = {name: value for name, value in constants.items() if name not in _OF_SIZES}
    return kernel.fn.__name__, frozenset({**types, **chosen}.items())


@pytest.fixture(scope="session", autouse=True)
def quiet_numpy() -> Iterator[None]:
    """NumPy, by which Triton's interpreter computes, keeps its remarks on infinities and NaN to itself."""
    with numpy.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_ahead() -> Iterator[None]:
    """Each launch in the interpreter is of a variant that ``make kernels`` compiles for every GPU."""
    if torch.cuda.is_available():  # where a test measures how long the host takes to launch
        yield
        return
    listed = {_choices(variant.kernel, variant.pointers, variant.constants) for variant in variants()}

    def checked(
        kernel: Any, programs: int, tensors: Any, integer: int, floats: Any, constants: Any, options: Any, **where: Any
    ) -> None:
        types = {name: _TYPES[tensor.dtype] for name, tensor in zip(kernel.arg_names, tensors, strict=False)}
        named = dict(zip(kernel.arg_names[-len(constants) :], constants, strict=True))
        launched = _choices(kernel, types, named)
        assert launched in listed, f"tools/kernel_variants.py lacks {launched}"
        launch(kernel, programs, tensors, integer, floats, constants, options, **where)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("adam", "cross_entropy", "flatten", "fold", "from_host"):
            patch.setattr(importlib.import_module(f"protrain_kernels.{module}"), "launch", checked)
        yield


_TRITON = pytest.param("triton", marks=[pytest.mark.gpu] if torch.cuda.is_available() else [])


@pytest.fixture(params=["c", "aten", _TRITON])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    name: str = request.param
    on_gpu = name == "triton" and torch.cuda.is_available()
    if name == "triton" and not on_gpu:
        for (module, function), launch in _INTERPRETED.items():
            monkeypatch.setattr(importlib.import_module(f"protrain_kernels.{module}"), function, launch)
    elif name == "aten":
        monkeypatch.setattr(host_kernels, "library", lambda: None)
        # By name: the package's attribute "adam" is the function. So a few thousand elements go in several slices.
        monkeypatch.setattr(importlib.import_module("protrain_kernels.adam"), "REFERENCE_SLICE", 512)
    elif name == "c" and host_library.library() is None:
        pytest.skip("no compiler for the host kernels")
    return Backend(name, torch.device("cuda", 0) if on_gpu else torch.device("cpu"))


@pytest.fixture(params=[_TRITON])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where the Triton kernels run: on a GPU, or on the CPU in the interpreter."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def compiled() -> None:
    """The compiled host kernels."""
    if host_library.library() is None:
        pytest.skip("no compiler for the host kernels")
