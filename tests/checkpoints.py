"""Helpers for tests of checkpoints: runs on torch's own optimizer, and saves with another manifest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from protrain.checkpoint.manifest import read_manifest, write_manifest
from protrain.distributed.ranks import Ranks
from protrain.engine.states.parameter_state import Part


class PlainOptimizer:
    """torch.optim.AdamW with the methods that a checkpoint uses, as a wrapped optimizer has them."""

    def __init__(self, model: nn.Module, learning_rate: float = 1e-2) -> None:
        self.model = model
        self.ranks = Ranks(None)
        self.inner = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.groups = self

    def trains(self, model: nn.Module) -> bool:
        return model is self.model

    def on_attach(self, action: Callable[[], None], *, loads: nn.Module) -> None:
        """Do ``action`` at once, as there is nothing to wait for."""
        action()

    def parameter_names(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.is_floating_point()]

    def local_elements(self, name: str) -> slice:
        return slice(0, self.model.get_parameter(name).numel())

    def export_parts(self, names: Iterable[str]) -> Iterator[tuple[str, Part]]:
        for name in names:
            parameter = self.model.get_parameter(name)
            state = {kind: value.clone() for kind, value in self.inner.state[parameter].items()}
            yield (
                name,
                Part(parameter.shape, self.local_elements(name), {"master": parameter.detach().clone(), **state}),
            )

    def check_parameter(self, name: str, tensors: Mapping[str, Any]) -> None:
        parameter = self.model.get_parameter(name)
        if tensors["master"].shape != parameter.shape:
            raise ValueError(f"{name} has shape {list(parameter.shape)}")

    def import_parts(self, parts: Iterable[tuple[str, slice, dict[str, torch.Tensor]]]) -> None:
        for name, elements, tensors in parts:
            assert elements == self.local_elements(name)
            parameter = self.model.get_parameter(name)
            whole = {k: value if k == "step" else value.view(parameter.shape) for k, value in tensors.items()}
            with torch.no_grad():
                parameter.copy_(whole.pop("master"))
            self.inner.state[parameter] = whole

    def scalar_state(self) -> dict[str, Any]:
        groups = self.inner.param_groups
        return {
            "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "parameters": [self.parameter_names()],
        }

    def check_state(self, state: dict[str, Any]) -> None:
        if len(state["param_groups"]) != len(self.inner.param_groups):
            raise ValueError(f"the state has {len(state['param_groups'])} groups")

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self.inner.param_groups, state["param_groups"], strict=True):
            group.update(saved)


def plain_optimizer(model: nn.Module) -> Any:
    """A plain optimizer in the place of the one that wrap returns."""
    return PlainOptimizer(model)


def make_model(seed: int, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        # It draws from all three generators, so that a resumed run needs every one of them.
        batch = torch.randn(16, 4) + random.random() + float(np.random.rand())
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.inner.step()
        optimizer.inner.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def make_run(seed: int) -> tuple[nn.Sequential, Any, Any]:
    model = make_model(seed)
    optimizer = plain_optimizer(model)
    # Milestones are a Counter with integer keys, which plain JSON would turn into text.
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer.inner, milestones=[3, 7], gamma=0.5)
    return model, optimizer, scheduler


def rewrite(save: Path, **changes: Any) -> None:
    """Change entries of the manifest of ``save``."""
    write_manifest(save, {**read_manifest(save), **changes})


def make_expanded(row: list[float]) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 4)
    model.register_buffer("row", torch.tensor(row))
    model.register_buffer("mask", model.get_buffer("row").expand(2, 3, len(row)))
    model.register_buffer("last", model.get_buffer("row")[-1].expand(4))
    return model, plain_optimizer(model)


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


def make_counting() -> tuple[nn.Sequential, Any]:
    model = nn.Sequential(Counting(), nn.Sequential(Counting()))
    return model, plain_optimizer(model)
