"""A warning names the line of the script that has called the library, however many calls of torch lie between."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.engine.harness import adamw

WIDTH = 16
ROWS = torch.ones(8, WIDTH)


class Layers(nn.Module):
    """Blocks with a switch for checkpointing, as those of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(model: nn.Module, optimizer: Any = None) -> nn.Module:
    options: dict[str, Any] = {"device": "cpu", "progress": False, "example_batch": (ROWS,)}
    model, _ = protrain.wrap(model, optimizer or adamw(model), **options)  # called from wrapped
    return model


def checkpointed_later() -> None:
    model = wrapped(Layers())
    vars(model)["gradient_checkpointing"] = True
    model(ROWS)  # here


def checkpointed_before() -> None:
    model = Layers()
    model.gradient_checkpointing = True
    wrapped(model)


def in_no_group() -> None:
    model = Layers()
    wrapped(model, torch.optim.AdamW(model.blocks[0].parameters()))


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        (checkpointed_later, "gradient checkpointing of the model was switched off", "# here"),
        (checkpointed_before, "gradient checkpointing of the model was switched off", "# called from wrapped"),
        (in_no_group, "4 parameters require a gradient", "# called from wrapped"),
    ],
)
def test_a_warning_is_shown_at_the_line_of_the_script(script: Callable[[], object], words: str, line: str) -> None:
    with pytest.warns(UserWarning, match=words) as caught:
        script()
    (warned,) = [one for one in caught if words in str(one.message)]
    assert warned.filename == __file__
    assert line in linecache.getline(warned.filename, warned.lineno)
