"""What a model built under ``protrain.empty_parameters`` must equal: the same construction, with memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import protrain
from tests.engine.harness import seeded


def build_both(make: Callable[[], nn.Module], *, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """The model of ``make`` built under ``empty_parameters``, and plainly with the random numbers that it then has."""
    with seeded(seed), protrain.empty_parameters():
        empty = make()
    with seeded(seed), own_seeds():
        plain = make()
    return empty, plain


@contextmanager
def own_seeds() -> Iterator[None]:
    """Every random operation takes one number from its generator, and draws with that as its seed.

    This is the documented rule of ``empty_parameters``, for a model that has memory.
    """
    truncated: Any = vars(nn.init)["_no_grad_trunc_normal_"]

    def trunc_normal_(tensor: Tensor, *args: Any, generator: torch.Generator | None = None) -> Tensor:
        return _with_own_seed(generator, lambda: truncated(tensor, *args))

    with pytest.MonkeyPatch.context() as patch, _OwnSeeds():
        patch.setattr(nn.init, "_no_grad_trunc_normal_", trunc_normal_)
        yield


class _OwnSeeds(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs = {**kwargs, "generator": None}
        return _with_own_seed(generator, lambda: func(*args, **kwargs))


def _with_own_seed(generator: torch.Generator | None, draw: Callable[[], Any]) -> Any:
    with _disable_current_modes():
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        with seeded():
            torch.default_generator.manual_seed(seed)
            return draw()
