"""The values of `--lora`, which says that an adapter of a model is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protrain.cli.options import text_for


@dataclass(frozen=True, kw_only=True)
class Lora:
    """What `--lora` asks for, in peft's words."""

    r: int = 16  # the rank
    alpha: int = 32  # what an adapter adds counts alpha / r times
    targets: str = "all-linear"  # or names of layers, joined by "+"
    dropout: float = 0.0  # of what an adapter reads


_KINDS: dict[str, Callable[[str], Any]] = {"r": int, "alpha": int, "targets": str, "dropout": float}


def refuse_4bit_alone(lora: str | None, *, load_in_4bit: bool) -> None:
    """Raise a ValueError for `--load-in-4bit` without `--lora`, as quantised weights cannot be trained."""
    if load_in_4bit and lora is None:
        raise ValueError("--load-in-4bit freezes the weights of the model: add an adapter to train, like --lora r=16")


def parse_lora(text: str) -> Lora:
    """The values in ``text``, like "r=16,alpha=32", which peft checks. ValueError for an unknown name, or no number."""
    try:
        return Lora(**{name: _KINDS[name](value) for name, value in (part.split("=") for part in text.split(","))})
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not made of r=N, alpha=N, targets=NAMES and dropout=P") from None


lora_text = text_for(parse_lora)  # an argparse type
