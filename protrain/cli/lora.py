"""The values of `--lora`, which says that an adapter of a model is trained."""

from __future__ import annotations

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


def refuse_4bit_alone(lora: str | None, *, load_in_4bit: bool) -> None:
    """Raise a ValueError for `--load-in-4bit` without `--lora`, as quantised weights cannot be trained."""
    if load_in_4bit and lora is None:
        raise ValueError("--load-in-4bit freezes the weights of the model: add an adapter to train, like --lora r=16")


def parse_lora(text: str) -> Lora:
    """The values in ``text``, like "r=16,alpha=32". ValueError if there is an unknown name or an impossible value."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        kind = {"r": int, "alpha": int, "targets": str, "dropout": float}.get(name)
        if kind is None or not sign or not value:
            raise ValueError(f"{part!r} is none of r=N, alpha=X, targets=NAMES and dropout=P")
        try:
            values[name] = kind(value)
        except ValueError:
            raise ValueError(f"{name}={value}: {name} must be a {'whole ' * (kind is int)}number") from None
    lora = Lora(**values)
    if lora.r < 1 or lora.alpha < 1 or not 0 <= lora.dropout < 1:
        raise ValueError("r and alpha must be at least 1, and dropout at least 0 and less than 1")
    return lora


lora_text = text_for(parse_lora)  # an argparse type
