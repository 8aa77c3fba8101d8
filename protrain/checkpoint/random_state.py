"""The random states that a training step draws from, as JSON values."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of torch's CPU and CUDA generators, of Python's ``random``, and of numpy's global generator."""
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


def check_random_state(state: dict[str, Any]) -> None:
    """Raise a ValueError if ``set_random_state`` could not set ``state``, by setting it in new generators."""
    _set(
        state,
        torch.Generator().set_state,
        lambda cuda, device: torch.Generator(f"cuda:{device}").set_state(cuda),
        random.Random().setstate,
        np.random.RandomState().set_state,
    )


def set_random_state(state: dict[str, Any]) -> None:
    """Set what ``random_state`` returned. CUDA devices beyond those of the save keep their states."""
    _set(state, torch.set_rng_state, torch.cuda.set_rng_state, random.setstate, np.random.set_state)


def _set(
    state: dict[str, Any],
    set_torch: Callable[[torch.Tensor], Any],
    set_cuda: Callable[[torch.Tensor, int], Any],
    set_python: Callable[[tuple[Any, ...]], None],
    set_numpy: Callable[[tuple[Any, ...]], None],
) -> None:
    try:
        set_torch(_tensor(state["torch"]))
        for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
            set_cuda(_tensor(text), device)
        version, words, gauss = state["python"]
        set_python((version, tuple(words), gauss))
        saved = state["numpy"]
        key = np.array(saved["key"], np.uint32)
        set_numpy((saved["bit_generator"], key, saved["pos"], saved["has_gauss"], saved["gauss"]))
    except (LookupError, OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"random states that cannot be set: {error}") from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
