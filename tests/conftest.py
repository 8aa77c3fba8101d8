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

from tests.tiny_models import VOCABULARY, tiny

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
    """``tests.tiny_models.tiny``, where there is transformers."""
    pytest.importorskip("transformers")
    return tiny


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``llama_folder(hidden_size=64, ...)``: what save_pretrained wrote of a small LLaMA whose tokens are bytes.

    A folder is made once for each configuration. A test that changes it makes a copy first.
    """
    pytest.importorskip("transformers")

    @cache
    def build(**sizes: Any) -> Path:
        folder = tmp_path_factory.mktemp("llama")
        usual = {"words": 256, "num_hidden_layers": 2, "num_key_value_heads": 4, "tie_word_embeddings": True}
        tiny("llama", **{**usual, **sizes}).save_pretrained(folder)
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
