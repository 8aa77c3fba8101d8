"""Converts Python values to JSON values, and back exactly."""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import torch
from torch import Tensor


def encode(value: Any, what: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """Convert ``value`` to JSON values that ``decode`` converts back exactly. Tuples and non-text keys are marked.

    Copies of tensors go to ``tensors``, if given.

    Raises:
        ValueError: it holds something that cannot be kept; the message names ``what``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, what, tensors) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, what, tensors) for item in value]}
    if isinstance(value, Counter | dict):
        if type(value) is dict and all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(item, what, tensors) for key, item in value.items()}
        kind = "__counter__" if isinstance(value, Counter) else "__dict__"
        return {kind: [[encode(key, what, tensors), encode(item, what, tensors)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if isinstance(value, Tensor) and tensors is not None:
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().clone().contiguous()
        return {"__tensor__": key}
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():  # a learning rate may be a 0-d tensor
        return {"__scalar__": [value.item(), str(value.dtype).removeprefix("torch.")]}
    kinds = "numbers, text, lists, dicts" + (", tensors" if tensors is not None else "")
    raise ValueError(f"{what} holds a {type(value).__name__}; a checkpoint keeps {kinds}")


def decode(value: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """What ``encode`` was given. ``tensors`` are those that it filled."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if isinstance(value, dict):
        if "__tuple__" in value:
            return tuple(decode(item, tensors) for item in value["__tuple__"])
        if "__bytes__" in value:
            return base64.b64decode(value["__bytes__"])
        if "__tensor__" in value:
            assert tensors is not None
            return tensors[value["__tensor__"]]
        if "__scalar__" in value:
            number, dtype = value["__scalar__"]
            return torch.tensor(number, dtype=getattr(torch, dtype))
        for kind, make in (("__counter__", Counter), ("__dict__", dict)):
            if kind in value:
                return make({decode(key, tensors): decode(item, tensors) for key, item in value[kind]})
        return {key: decode(item, tensors) for key, item in value.items()}
    return value
