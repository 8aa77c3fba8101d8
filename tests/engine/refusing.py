"""What tests of refusals share: one that left everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import protrain


def refused(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, words: str, kind: type[Exception], **options: Any
) -> Exception:
    """Wrapping raises ``kind`` with ``words``, and leaves model and optimizer as they were."""
    parameters = [(p, p.data_ptr(), p.detach().clone(), type(p)) for p in model.parameters()]
    attributes = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    arguments: Any = {"device": "cpu", "progress": False} | options
    with pytest.raises(kind, match=words) as caught:
        protrain.wrap(model, optimizer, example_batch=batch, **arguments)
    assert type(caught.value) is kind, "a subclass says something else"
    for parameter, address, value, cls in parameters:
        assert parameter.data_ptr() == address
        assert type(parameter) is cls
        assert parameter.equal(value)
        assert parameter.grad is None
    assert [{name: id(value) for name, value in vars(module).items()} for module in model.modules()] == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "\n" not in str(caught.value)
    return caught.value
