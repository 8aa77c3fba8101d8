"""Models by name: published shapes with random weights, which are built without their weights ever existing whole.

Dropout is off and there are no special tokens, as in pre-training on plain text. The shapes come from the model cards
of OPT (arXiv 2205.01068), LLaMA-2 (2307.09288; 34B as released in Code Llama, 2308.12950), Llama 3 (2407.21783; 1B as
released in Llama 3.2), Mistral 7B (2310.06825) and Qwen2.5 (2412.15115). The large GPT-2 shapes are no released models:
offloading papers use these hidden sizes and depths, with heads of 128.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A named causal language model."""

    family: str  # transformers' model_type
    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None  # None means as many as heads
    mlp: int | None = None  # None means 4 x hidden
    vocabulary: int
    positions: int
    tied: bool = False  # whether input and output embedding are one parameter
    sequence: int = 1024  # the default of the command line, as in the paper


_gpt2 = partial(Shape, family="gpt2", vocabulary=50257, positions=1024, tied=True)
_opt = partial(Shape, family="opt", vocabulary=50272, positions=2048, tied=True)
_llama2 = partial(Shape, family="llama", vocabulary=32000, positions=4096)
_llama3 = partial(Shape, family="llama", kv_heads=8, vocabulary=128256, positions=8192)
_qwen25 = partial(Shape, family="qwen2", vocabulary=152064, positions=32768)

SHAPES: dict[str, Shape] = {
    # tokens are bytes
    "tiny": Shape(
        family="llama",
        hidden=192,
        layers=4,
        heads=6,
        mlp=512,
        vocabulary=256,
        positions=1024,
        tied=True,
        sequence=256,
    ),
    "gpt2": _gpt2(hidden=768, layers=12, heads=12),
    "gpt2-10b": _gpt2(hidden=4096, layers=48, heads=32),
    "gpt2-15b": _gpt2(hidden=8192, layers=18, heads=64),
    "gpt2-20b": _gpt2(hidden=8192, layers=24, heads=64),
    "gpt2-30b": _gpt2(hidden=8192, layers=37, heads=64),
    "gpt2-40b": _gpt2(hidden=8192, layers=50, heads=64),
    "opt-13b": _opt(hidden=5120, layers=40, heads=40),
    "opt-30b": _opt(hidden=7168, layers=48, heads=56),
    "llama-1b": _llama2(hidden=2048, layers=24, heads=16, mlp=5504),
    "llama-7b": _llama2(hidden=4096, layers=32, heads=32, mlp=14336, kv_heads=8),
    "llama2-13b": _llama2(hidden=5120, layers=40, heads=40, mlp=13824),
    "llama2-34b": _llama2(hidden=8192, layers=48, heads=64, mlp=22016, kv_heads=8),
    "llama3-8b": _llama3(hidden=4096, layers=32, heads=32, mlp=14336),
    "llama3-70b": _llama3(hidden=8192, layers=80, heads=64, mlp=28672),
    "llama3.2-1b": _llama3(hidden=2048, layers=16, heads=32, mlp=8192, tied=True),
    "mistral-7b": Shape(
        family="mistral", hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocabulary=32000, positions=32768
    ),
    "qwen2.5-7b": _qwen25(hidden=3584, layers=28, heads=28, kv_heads=4, mlp=18944),
    "qwen2.5-14b": _qwen25(hidden=5120, layers=48, heads=40, kv_heads=8, mlp=13824),
    "qwen2.5-32b": _qwen25(hidden=5120, layers=64, heads=40, kv_heads=8, mlp=27648),
}


def named(model: str) -> str:
    """An argparse type: MODEL. A folder of the working directory goes before a shape of the same name, as ./tiny.

    A shape is also found by its name as people write it, such as Llama3_8B.
    """
    if Path(model, "config.json").is_file():
        return f"./{model}" if model in SHAPES else model
    return next((name for name in SHAPES if _plain(name) == _plain(model)), model)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


def describe(name: str, *, layers: int | None = None) -> str:
    """What ``protrain.cli.models`` would make the model ``name`` from, at no cost. "" if there is no such model."""
    if name in SHAPES:
        return repr(SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers))
    try:
        return Path(name, "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def shape_config(shape: Shape) -> Any:
    """The transformers configuration of ``shape``."""
    import transformers

    mlp = shape.mlp or 4 * shape.hidden
    llama = {"intermediate_size": mlp, "num_key_value_heads": shape.kv_heads or shape.heads, "pad_token_id": None}
    own: dict[str, dict[str, Any]] = {
        "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "opt": {"word_embed_proj_dim": shape.hidden, "ffn_dim": mlp, "dropout": 0.0, "pad_token_id": None},
        "llama": llama,
        # A window of 4096 would make attention build a mask. Later releases dropped the window.
        "mistral": {**llama, "sliding_window": None},
        "qwen2": {**llama, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    }
    return transformers.AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        **own[shape.family],
    )
