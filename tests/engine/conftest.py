"""The devices that the engine's tests run on, with deterministic operators where bits are compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from protrain import wrapping
from tests.engine.profiles import share_profiles

# Read by cuBLAS when its first handle is made.
os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:2"
)  # of both deterministic settings, the one for cuDNN RNNs too


@pytest.fixture(scope="session", autouse=True)
def imports() -> None:
    """What would be imported in the middle of a test, which counts allocations or collections."""
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForCausalLM is not None  # imported at its first use
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(False)  # imports torch's compiler at its first call


@pytest.fixture(scope="module", autouse=True)  # of engine tests alone
def shared_profiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_profiles(patch)
        yield


@pytest.fixture
def no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a folder shows before the model runs, which takes minutes where it is large."""

    def profile(*_: Any, **__: Any) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(wrapping, "cached_profile", profile)


@pytest.fixture
def batch(tiny_batch: Callable[..., dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One batch for the tiny models."""
    return tiny_batch()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The CPU, and a GPU where there is one."""
    kind: str = request.param
    if kind == "cpu":
        yield torch.device("cpu")
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield torch.device("cuda", 0)
    finally:
        torch.use_deterministic_algorithms(False)
