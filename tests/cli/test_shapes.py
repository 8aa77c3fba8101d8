"""Named shapes have the sizes that their names promise."""

from __future__ import annotations

import pytest
import torch

from protrain.cli.shapes import SHAPES

transformers = pytest.importorskip("transformers")

# These are published parameter counts. The large GPT-2 shapes are named after theirs.
BILLIONS = {
    "tiny": 0.00182,
    "gpt2": 0.12444,
    "gpt2-10b": 9.876,
    "gpt2-15b": 14.918,
    "gpt2-20b": 19.75,
    "gpt2-30b": 30.22,
    "gpt2-40b": 40.69,
    "opt-13b": 12.853,
    "opt-30b": 29.975,
    "llama-1b": 1.3454,
    "llama-7b": 7.2417,
    "llama2-13b": 13.016,
    "llama2-34b": 33.744,
    "llama3-8b": 8.0303,
    "llama3-70b": 70.554,
    "llama3.2-1b": 1.2358,
    "mistral-7b": 7.2417,
    "qwen2.5-7b": 7.6156,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_its_size_and_no_special_tokens(name: str) -> None:
    config = transformers.AutoConfig.for_model(**SHAPES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=1e-3)
    assert model.generation_config.eos_token_id is None
