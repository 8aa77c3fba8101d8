"""Rows of results without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from torch import nn

from bench.kernels.machine import this_machine
from bench.kernels.rows import OURS, Row
from protrain.profiler.cache import cached_profile, fingerprint
from protrain.profiler.model_profile import ModelProfile


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As before: a contestant says there which process of a run it is, and later tests would take that for theirs."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def profiled_once() -> Iterator[None]:
    """A model is profiled once on the CPU, and not again for each plan under which it is trained."""
    known: dict[str, ModelProfile] = {}

    def kept(model: nn.Module, example_batch: Any, **how: Any) -> ModelProfile:
        of = {name: how[name] for name in ("optimizer", "device", "dtype")}
        key = fingerprint(model, example_batch, **of)
        if key not in known:
            known[key] = cached_profile(model, example_batch, **how)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("protrain.wrapping", "bench.planner.measure"):
            patch.setattr(f"{module}.cached_profile", kept)
        yield


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """``make_row(**fields)``: a row of an invented operator that moved 3 GB in 2 ms."""

    def make(**fields: Any) -> Row:
        values: dict[str, Any] = {
            **{"operator": "mix, twice", "shape": "gpt2-10b block", "dtype": "bfloat16", "implementation": OURS},
            **{"version": "", "verdict": "bits equal", "bytes": 3_000_000_000, "flops": 5_000_000_000},
            **{"roof": "device copy", "roof_gbps": 2000.0, "datasheet_gbps": 3000.0, "median_ms": 2.0},
            **{"p20_ms": 1.9, "p80_ms": 2.2, "rounds": 9, "machine": this_machine()},
        }
        return Row(**(values | fields))

    return make
