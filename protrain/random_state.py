"""The random states that a training step draws from, as plain JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from protrain.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """States of torch's CPU and CUDA generators, Python's ``random`` and numpy's global one."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
        "python": [version, list(words), gauss],
        "numpy": {
            **{key: numpy_state[key] for key in ("bit_generator", "has_gauss", "gauss")},
            "key": numpy_state["state"]["key"].tolist(),
            "pos": numpy_state["state"]["pos"],
        },
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set what :func:`random_state` returned; CUDA devices beyond those of the save keep theirs."""
    try:
        torch.set_rng_state(_tensor(state["torch"]))
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        saved = state["numpy"]
        np.random.set_state(
            (
                saved["bit_generator"],
                np.array(saved["key"], np.uint32),
                saved["pos"],
                saved["has_gauss"],
                saved["gauss"],
            )
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random state cannot be restored: {error}") from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
