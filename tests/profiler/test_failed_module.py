"""An error of the model in its first step names the module that raised it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import protrain


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 10)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def notes_of(model: nn.Module, ids: Tensor, labels: Tensor) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((IndexError, RuntimeError)) as raised:
        protrain.wrap(model, optimizer, example_batch=(ids, labels), device="cpu", progress=False)
    return raised.value.__notes__


def test_an_index_beyond_an_embedding_names_it_and_its_rows() -> None:
    ids = torch.tensor([3, 10])
    assert notes_of(_Net(), ids, ids % 10) == [
        "raised while profiling _Net, in the forward of tokens, which is Embedding(10, 4)"
    ]


def test_an_error_in_a_block_names_the_layer() -> None:
    model = _Net()
    model.layers[1] = nn.Sequential(nn.Linear(5, 4), nn.Tanh())
    notes = notes_of(model, torch.arange(2), torch.arange(2))
    assert notes == [
        "raised while profiling _Net, in the forward of layers.1.0, which is "
        "Linear(in_features=5, out_features=4, bias=True)"
    ]


def test_an_error_of_the_loss_is_one_of_the_model() -> None:
    assert notes_of(_Net(), torch.arange(2), torch.tensor([3, 10])) == [
        "raised while profiling _Net, in the forward of the model"
    ]
