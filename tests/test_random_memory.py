"""Random states of Python and numpy, where their memory does not show what is drawn."""

from __future__ import annotations

import ctypes
import random
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import numpy as np
import pytest
import torch

from protrain.forward import rng


class _Elsewhere:
    """Stands for the type of a byte of memory in which nothing ever changes."""

    raw = b""

    def __mul__(self, count: int) -> _Elsewhere:
        return self

    def from_address(self, address: int) -> _Elsewhere:
        return self


@pytest.mark.parametrize("readable", [True, False])
def test_a_block_draws_the_same_numbers_again(monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
    """Also if Python or numpy keep their states elsewhere than the module expects when it is imported."""
    if not readable:
        monkeypatch.setattr(ctypes, "c_char", _Elsewhere())
    spec = spec_from_file_location("rng_of_this_test", rng.__file__)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module._shows_draws() is readable
    states = []
    drawn: list[tuple[float, float]] = []
    for _ in range(3):
        states.append(module.BlockRandomState(torch.device("cpu"), []))
        drawn.append((random.random(), float(np.random.standard_normal())))
    for state, numbers in zip(reversed(states), reversed(drawn), strict=True):
        with state:
            assert (random.random(), float(np.random.standard_normal())) == numbers
    assert len(set(drawn)) == 3
