"""Liger's kernels, by which a loss is computed piece by piece. Whether they are installed is known without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any


def is_installed() -> bool:
    """Whether the package liger-kernel is installed. It is not imported."""
    return importlib.util.find_spec("liger_kernel") is not None


def import_loss() -> Callable[..., Any]:
    """Import Liger's loss, which takes hidden states and the weight of the head in place of logits."""
    from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

    loss: Callable[..., Any] = LigerForCausalLMLoss
    return loss
