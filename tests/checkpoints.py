"""Small trainings on the CPU for tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import protrain


def wrapped(model: nn.Module, n_groups: int = 1) -> Any:
    """``model`` and its optimizer, with the parameters dealt to ``n_groups`` groups."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[index::n_groups]} for index in range(n_groups)], lr=1e-2)
    how: dict[str, Any] = {"device": "cpu", "device_memory": "64MiB", "host_memory": "1GiB", "progress": False}
    return protrain.wrap(model, optimizer, example_batch=(torch.zeros(16, 4),), **how)


def make_model(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 2))


def make_run(seed: int) -> tuple[nn.Sequential, Any, Any]:
    model, optimizer = wrapped(make_model(seed))
    # Milestones are a Counter with integer keys, which plain JSON would turn into text.
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 7], gamma=0.5)


def train(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """A step."""
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def make_expanded(row: list[float]) -> Any:
    model = nn.Linear(4, 4)
    model.register_buffer("row", torch.tensor(row))
    model.register_buffer("mask", model.get_buffer("row").expand(2, 3, len(row)))
    model.register_buffer("last", model.get_buffer("row")[-1].expand(4))
    return wrapped(model)


class Counting(nn.Linear):
    """A module that has state of every possible kind."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.order = nn.Parameter(torch.arange(4), requires_grad=False)
        self.state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def make_counting() -> Any:
    return wrapped(nn.Sequential(Counting(), nn.Sequential(Counting())))
