"""How many tokens a model of the command line can be trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protrain.cli.models import fit_positions, load_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def test_positions_that_are_weights_stay_as_many_as_they_are() -> None:
    loaded = load_model("gpt2", layers=1)
    fit_positions(loaded, 1024)
    with pytest.raises(ValueError, match="--sequence 1025 is longer than the 1024 positions"):
        fit_positions(loaded, 1025)


def test_computed_positions_of_random_weights_have_no_end() -> None:
    loaded = load_model("tiny", layers=1)
    positions = loaded.config.max_position_embeddings
    fit_positions(loaded, positions - 1)
    assert loaded.config.max_position_embeddings == positions
    fit_positions(loaded, positions + 7)
    assert loaded.config.max_position_embeddings == positions + 7  # what a saved model then says of itself


@pytest.mark.parametrize("scaled", [False, True])
def test_trained_and_scaled_positions_end(scaled: bool, tmp_path: Path) -> None:
    loaded = load_model("tiny", layers=1)
    positions = loaded.config.max_position_embeddings
    if scaled:
        loaded.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    else:
        with torch.random.fork_rng(devices=[]):
            transformers.AutoModelForCausalLM.from_config(loaded.config).save_pretrained(tmp_path)
        loaded = load_model(str(tmp_path))
    with pytest.raises(ValueError, match=f"longer than the {positions} positions"):
        fit_positions(loaded, positions + 1)
