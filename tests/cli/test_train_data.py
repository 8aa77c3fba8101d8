"""Examples in one sequence: in which models they see each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from protrain.cli.models import LoadedModel
from tests.engine.families import FAMILIES

transformers = pytest.importorskip("transformers")
keeps_rows_apart = pytest.importorskip("protrain.cli.train_data", exc_type=ImportError).keeps_rows_apart
LENGTH = 12
NAMES = ["gpt2", "opt", "bloom", "llama", "gemma3_text", "mixtral", "gpt_oss", "qwen3_next", "lfm2", "minimax", "rwkv"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_of_a_family_is_what_it_does(name: str) -> None:
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.make().eval()
        first, other, second = torch.randint(10, 96, (3, 1, LENGTH))
    loaded = LoadedModel(model=model, folder=None)

    def says_of_second(before: Tensor) -> Tensor:
        ids = torch.cat([before, second], dim=1)
        places = torch.arange(LENGTH).repeat(2)[None]
        with torch.no_grad():
            logits: Tensor = model(**loaded.arguments({"input_ids": ids, "position_ids": places})).logits
        return logits[:, LENGTH:]

    difference = (says_of_second(first) - says_of_second(other)).abs().max()
    model.to("meta")
    sees_first = difference.item() > 1e-5  # experts add in an order that differs
    assert keeps_rows_apart(model) == (not sees_first)
