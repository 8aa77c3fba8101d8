"""Models by name: published shapes with random weights, which are built without their weights ever existing whole.

Dropout is off and there are no special tokens, as in pre-training on plain text. The shapes come from the model cards
of OPT (arXiv 2205.01068), LLaMA-2 (2307.09288; 34B as released in Code Llama, 2308.12950), Llama 3 (2407.21783; 1B as
released in Llama 3.2), Mistral 7B (2310.06825) and Qwen2.5 (2412.15115). The large GPT-2 shapes are no released models:
offloading papers use these hidden sizes and depths, with heads of 128.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any


def _shape(family: str, hidden: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    """The arguments with which ``AutoConfig.for_model`` of transformers makes the configuration."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"model_type": family, **sizes, **no_tokens, **others}


_gpt2 = partial(
    _shape,
    "gpt2",
    vocab_size=50257,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
_opt = partial(_shape, "opt", vocab_size=50272, max_position_embeddings=2048, tie_word_embeddings=True, dropout=0.0)
_tiny = partial(_shape, "llama", vocab_size=256, max_position_embeddings=256, tie_word_embeddings=True)
_llama2 = partial(_shape, "llama", vocab_size=32000, max_position_embeddings=4096)
_llama3 = partial(_shape, "llama", vocab_size=128256, max_position_embeddings=8192, num_key_value_heads=8)
# A window of 4096 would make attention build a mask. Later releases dropped the window.
_mistral = partial(_shape, "mistral", vocab_size=32000, max_position_embeddings=32768, sliding_window=None)
_qwen25 = partial(
    _shape,
    "qwen2",
    vocab_size=152064,
    max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)

SHAPES: dict[str, dict[str, Any]] = {
    # tokens are bytes
    "tiny": _tiny(192, 4, 6, intermediate_size=512),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-10b": _gpt2(4096, 48, 32),
    "gpt2-15b": _gpt2(8192, 18, 64),
    "gpt2-20b": _gpt2(8192, 24, 64),
    "gpt2-30b": _gpt2(8192, 37, 64),
    "gpt2-40b": _gpt2(8192, 50, 64),
    "opt-13b": _opt(5120, 40, 40, ffn_dim=20480, word_embed_proj_dim=5120),
    "opt-30b": _opt(7168, 48, 56, ffn_dim=28672, word_embed_proj_dim=7168),
    "llama-1b": _llama2(2048, 24, 16, intermediate_size=5504),
    "llama-7b": _llama2(4096, 32, 32, intermediate_size=14336, num_key_value_heads=8),
    "llama2-13b": _llama2(5120, 40, 40, intermediate_size=13824),
    "llama2-34b": _llama2(8192, 48, 64, intermediate_size=22016, num_key_value_heads=8),
    "llama3-8b": _llama3(4096, 32, 32, intermediate_size=14336),
    "llama3-70b": _llama3(8192, 80, 64, intermediate_size=28672),
    "llama3.2-1b": _llama3(2048, 16, 32, intermediate_size=8192, tie_word_embeddings=True),
    "mistral-7b": _mistral(4096, 32, 32, intermediate_size=14336, num_key_value_heads=8),
    "qwen2.5-7b": _qwen25(3584, 28, 28, intermediate_size=18944, num_key_value_heads=4),
    "qwen2.5-14b": _qwen25(5120, 48, 40, intermediate_size=13824, num_key_value_heads=8),
    "qwen2.5-32b": _qwen25(5120, 64, 40, intermediate_size=27648, num_key_value_heads=8),
}


def at_depth(name: str, layers: int | None = None) -> dict[str, Any]:
    """The shape of that ``name``, with another number of ``layers`` if that is given."""
    return SHAPES[name] if layers is None else {**SHAPES[name], "num_hidden_layers": layers}


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
        return repr(at_depth(name, layers))
    try:
        return Path(name, "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""
