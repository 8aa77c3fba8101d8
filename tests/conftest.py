"""What every test runs under: few threads, poisoned buffers, Triton's interpreter where there is no GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import VOCABULARY, config_of

# Of this process, and of those that tests start: where threads of a loop wait for a core that another test has, small
# operations take milliseconds.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Read when a kernel is decorated, so it must stand before the first import of one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The engine overwrites a released buffer with NaN, so that a stale view fails instead of nearly working.
os.environ.setdefault("PROTRAIN_DEBUG", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["PROTRAIN_CACHE"] = "0"  # a test is of the code at hand

ModelBuilder = Callable[..., torch.nn.Module]


@pytest.fixture(scope="session")
def tiny_model() -> ModelBuilder:
    """``tiny_model(family, seed=0, words=96)``: a small transformers gpt2, opt, llama, mistral or t5 in fp32."""
    transformers = pytest.importorskip("transformers")

    def build(family: str, seed: int = 0, words: int = VOCABULARY) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
            config = config_of(family)
            config.vocab_size = words
            model: torch.nn.Module = kind.from_config(config)
        return model

    return build


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``llama_folder(hidden_size=64, ...)``: what save_pretrained wrote of a small LLaMA whose tokens are bytes.

    A folder is made once for each configuration. A test that changes it makes a copy first.
    """
    transformers = pytest.importorskip("transformers")

    @cache
    def build(**sizes: Any) -> Path:
        usual: dict[str, Any] = {
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        folder = tmp_path_factory.mktemp("llama")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**(usual | sizes))).save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def tiny_batch() -> Callable[..., dict[str, torch.Tensor]]:
    """``tiny_batch(seed=0, batch=2, sequence=16)``: token ids and labels that every tiny model takes."""

    def build(seed: int = 0, batch: int = 2, sequence: int = 16) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, VOCABULARY, (batch, sequence), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return build


_modules_frozen = 0


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """Wrapping collects garbage, which would go through all that the libraries made when they were imported."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip, saying why, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
