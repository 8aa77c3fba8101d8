"""Blocks and chunks of the paper's models: what the kernels meet in training, not round numbers."""

from __future__ import annotations

import math
import random
from typing import Any

from protrain.cli.shapes import SHAPES

# GPT-2 15B, 20B, 30B and 40B differ in depth alone, so one block stands for all.
MODELS = ("gpt2-10b", "gpt2-20b", "opt-13b", "opt-30b", "llama2-13b", "llama2-34b", "mistral-7b")
SMALL_TENSORS = "200 tensors of 1-100 KiB"
QUICK = ("gpt2-10b", "llama2-13b", SMALL_TENSORS)
# Rows of hidden states, their width, and words: the last layer and its loss. That of GPT-2 has an odd vocabulary.
HEADS = {
    "qwen2.5-7b head": (8192, 3584, 152064),
    "llama3-8b head": (16384, 4096, 128256),
    "gemma-7b head": (16384, 3072, 256000),
    "tinyllama-1.1b head": (1024, 2048, 32000),
    "gpt2 head": (8192, 768, 50257),
}
QUICK_HEADS = ("tinyllama-1.1b head", "gpt2 head")
_SHRINK = 64  # of every dimension where there is no GPU and only correctness is checked


def block_parameters(shape: dict[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the parameters of one block of ``shape``, in the order in which transformers names them."""
    hidden, family = shape["hidden_size"], shape["model_type"]
    mlp = shape.get("intermediate_size", 4 * hidden)
    vector = (hidden,)
    if family == "gpt2":
        return [
            *(vector, vector, (hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), vector),
            *(vector, vector, (hidden, mlp), (mlp,), (mlp, hidden), vector),
        ]
    if family == "opt":
        return [*4 * [(hidden, hidden), vector], *2 * [vector], (mlp, hidden), (mlp,), (hidden, mlp), *3 * [vector]]
    assert family in ("llama", "mistral"), family
    heads = shape["num_attention_heads"]
    narrow = hidden // heads * shape.get("num_key_value_heads", heads)
    attention = [(hidden, hidden), (narrow, hidden), (narrow, hidden), (hidden, hidden)]
    return [*attention, (mlp, hidden), (mlp, hidden), (hidden, mlp), vector, vector]


def tensor_shapes(name: str, *, whole: bool) -> list[tuple[int, ...]]:
    """The shapes of the tensors that ``name`` stands for: a model's block, or ``SMALL_TENSORS``.

    Shrunk unless ``whole``.
    """
    if name == SMALL_TENSORS:
        draw = random.Random(0)
        bf16: list[tuple[int, ...]] = [(draw.randint(1024, 100 * 1024) // 2,) for _ in range(200)]
        return bf16 if whole else bf16[:4]
    shapes = block_parameters(SHAPES[name])
    return shapes if whole else [tuple(-(-size // _SHRINK) for size in shape) for shape in shapes]


def head_shape(name: str, *, whole: bool) -> tuple[int, int, int]:
    """(rows, hidden, words) of a name in ``HEADS``, shrunk unless ``whole``."""
    rows, hidden, words = HEADS[name]
    return (rows, hidden, words) if whole else (-(-rows // _SHRINK), -(-hidden // _SHRINK), -(-words // _SHRINK))


def chunk_elements(name: str, *, whole: bool) -> int:
    """Elements of the chunk that holds one block of the model ``name``: every parameter padded to 128."""
    return sum(-(-math.prod(shape) // 128) * 128 for shape in tensor_shapes(name, whole=whole))
