"""Profiles that tests share: profiling a model takes as long as all else that wrapping it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain import wrapping
from protrain.profiler.cache import fingerprint
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.step_times import Together
from protrain.profiler.trace import profile

_known: dict[str, ModelProfile] = {}


def shared_profile(
    model: nn.Module,
    example_batch: Any,
    *,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtype: torch.dtype,
    show: Callable[[str], None] | None = None,
    device_bytes: int | None = None,
    together: Together | None = None,
) -> ModelProfile:
    """``protrain.profile`` of the first model that is like this one."""
    how: dict[str, Any] = {"optimizer": optimizer, "device": device, "dtype": dtype}
    key = fingerprint(model, example_batch, **how)
    if key not in _known:
        _known[key] = protrain.profile(model, example_batch, **how)
    return _known[key]


def _profile_of_wrap(model: nn.Module, example_batch: Any, **how: Any) -> ModelProfile:
    """A model without weights is always profiled: its weights are made for that, which is for tests to see."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return profile(model, example_batch, **how)
    return shared_profile(model, example_batch, **how)


def share_profiles(patch: pytest.MonkeyPatch) -> None:
    """Let wrap find the profile of any model that is alike, as in its cache."""
    patch.setattr(wrapping, "cached_profile", _profile_of_wrap)
    patch.setattr("protrain.profiler.cache._user_code", str)  # which no test edits: to read it all takes time
