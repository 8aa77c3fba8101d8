"""PROTRAIN_DEVICE_MEMORY and PROTRAIN_HOST_MEMORY limit the memory where the call of wrap does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.common.errors import PlanError


def _plan(**limits: Any) -> protrain.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 256)
    return protrain.wrap(model, optimizer, example_batch=batch, device="cpu", progress=False, **limits)[1].plan


def test_the_device_is_limited_unless_the_call_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DEVICE_MEMORY", "3MiB")
    limited = _plan()
    assert limited.device_bytes <= 3 << 20
    assert limited == _plan(device_memory="3MiB")
    assert _plan(device_memory="64MiB").n_persist > limited.n_persist


def test_the_host_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _plan(device_memory="3MiB").host_bytes > 1 << 20
    monkeypatch.setenv("PROTRAIN_HOST_MEMORY", "1MiB")
    with pytest.raises(PlanError):
        _plan(device_memory="3MiB")


def test_what_is_no_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTRAIN_DEVICE_MEMORY", "much")
    with pytest.raises(ValueError, match="much"):
        _plan()
