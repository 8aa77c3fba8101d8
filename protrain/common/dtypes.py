"""The types in which weights and moments can train, by name: what is read and planned without torch uses the names."""

from __future__ import annotations

DTYPES = ("bfloat16", "float16", "float32")  # of weights
MOMENT_DTYPES = ("float32", "bfloat16")  # of Adam's two moments


def default_dtype(device_type: str) -> str:
    """The name of the type of weights on a "cuda", "meta" or "cpu" device, if the user asks for none."""
    return "float32" if device_type == "cpu" else "bfloat16"


def full_dtype(name: str) -> str:
    """The name of a type by its short name, like bfloat16 for bf16. Other names stay as they are."""
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(name, name)
