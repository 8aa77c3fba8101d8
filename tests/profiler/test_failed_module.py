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


IDS = torch.arange(2)
TOO_LARGE = torch.tensor([3, 10])


@pytest.mark.parametrize(
    ("width", "ids", "labels", "where"),
    [
        (4, TOO_LARGE, IDS, "tokens, which is Embedding(10, 4)"),
        (5, IDS, IDS, "layers.1.0, which is Linear(in_features=5, out_features=4, bias=True)"),
        (4, IDS, TOO_LARGE, "the model"),
    ],
    ids=["an index beyond the rows", "a layer in a block", "the loss"],
)
def test_an_error_names_the_module_that_raised_it(width: int, ids: Tensor, labels: Tensor, where: str) -> None:
    model = _Net()
    model.layers[1] = nn.Sequential(nn.Linear(width, 4), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((IndexError, RuntimeError)) as raised:
        protrain.wrap(model, optimizer, example_batch=(ids, labels), device="cpu", progress=False)
    assert raised.value.__notes__ == [f"raised while profiling _Net, in the forward of {where}"]
