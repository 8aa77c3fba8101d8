"""The sides of a random script: what they have in common, and the model under a plan."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_map

import protrain
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import Spec, adamw, seeded, wrap_under
from tests.engine.residual import Model
from tests.random_scripts.models import DEPTH, MODELS, WIDTH, Adapter, batch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What a script is run on."""

    model: str
    dtype: torch.dtype
    spec: Spec
    inside: bool  # whether updates are made inside backward
    ranks: int = 1
    narrow: bool = False  # moments in bfloat16
    accumulation: int = 1  # the backwards of a step for which the plan has memory
    late: bool = False  # without an example batch, so that the first call of the model begins the training

    def make(self) -> Model:
        """The model, with the same weights each time."""
        with seeded():
            return MODELS[self.model](WIDTH, DEPTH)


class Side:
    """A model and its optimizer, with what a script has left open."""

    model: Any
    optimizer: Any

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pending: list[Tensor] = []  # losses of one rank whose backward comes later
        self.handles: list[Any] = []  # of hooks
        self.snapshot: Any = None
        self.scheduler: Any = None
        self._frozen = {name for name, parameter in case.make().named_parameters() if not parameter.requires_grad}

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that had gradients when the model was wrapped."""
        return [parameter for name, parameter in self.model.named_parameters() if name not in self._frozen]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the step."""
        self.optimizer.zero_grad(set_to_none)

    def give_up(self) -> None:
        """Forget the step, and losses whose backward has not come."""
        self.pending.clear()
        self.zero_grad()

    def schedule(self, kind: str) -> None:
        """Let a scheduler set the hyperparameters from now on."""
        if kind == "cycle":
            self.scheduler = lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=200)
        elif kind == "factor":
            self.scheduler = lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        else:
            warm = lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=2)
            rest = lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)
            self.scheduler = lr_scheduler.SequentialLR(self.optimizer, [warm, rest], milestones=[2])
        self.scheduler.kind = kind

    def whole(self) -> AbstractContextManager[None]:
        """A context in which all weights are whole, and frozen ones may be edited."""
        return nullcontext()

    def read_all(self) -> list[Tensor]:
        """All weights."""
        with self.whole():
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def parameter(self, index: int) -> nn.Parameter:
        """In definition order, beginning again after the last."""
        found = list(self.model.parameters())
        return found[index % len(found)]

    def named(self, index: int) -> str:
        """The name of ``parameter(index)``."""
        names = [name for name, _ in self.model.named_parameters()]
        return names[index % len(names)]


class Wrapped(Side):
    """The training under a plan. Its methods do what those of ``Plain`` do."""

    optimizer: ProTrainOptimizer

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._wrap(case.spec)

    def _wrap(self, spec: Spec) -> None:
        model, case = self.case.make(), self.case
        options: dict[str, Any] = {"step_during_backward": True} if case.inside else {}
        if case.ranks > 1:
            options.update(world_size=case.ranks, gradient_reduction="sum")
        if case.narrow:
            options["moment_dtype"] = "bfloat16"
        if case.accumulation > 1:
            options["accumulation"] = case.accumulation
        how = {"device": CPU, "dtype": case.dtype, "late": case.late, **options}
        self.model, self.optimizer = wrap_under(spec, model, adamw(model), (batch(0),), **how)

    def edit(self, index: int, factor: float, *, outer: bool = False) -> None:
        parameter = self.parameter(index)
        if outer:
            with protrain.full_parameters(self.model), protrain.full_parameters(self.model.blocks):
                parameter.data = parameter.data * factor
            return
        with protrain.full_parameters(self.model), torch.no_grad():
            parameter.mul_(factor)

    def step_with(self, closure: Callable[[], Tensor]) -> None:
        self.optimizer.step(closure)

    def load_some(self, weights: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights, strict=False)

    def edit_outside(self, index: int, how: str) -> None:
        parameter = self.parameter(index)
        try:
            if how == "in place":
                with torch.no_grad():
                    parameter.mul_(0.5)
            elif how == "data":
                parameter.data.mul_(0.5)
            elif how == "replaced":
                parameter.data = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)
            elif how == "rows":
                parameter.detach().view(-1)[:2].fill_(0.25)
            elif how == "out":
                torch.zeros(parameter.shape, out=parameter.detach())
            elif how == "foreach":
                with torch.no_grad():
                    torch._foreach_mul_(list(self.model.parameters()), 0.5)
            else:
                nn.init.zeros_(parameter)
        except protrain.MisuseError:
            return
        raise AssertionError("a weight could be written")

    def keep(self, how: str, folder: Path) -> None:
        if how == "checkpoint":
            protrain.save_checkpoint(folder, self.model, self.optimizer)
            self.snapshot = folder, None
        elif how == "thread":
            self.snapshot = folder, protrain.async_save(folder, self.model, self.optimizer)
        else:
            states = self.model.state_dict(), self.optimizer.state_dict()
            self.snapshot = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, states)

    def go_back(self, *, with_optimizer: bool) -> None:
        if isinstance(self.snapshot[0], Path):
            if isinstance(self.snapshot[1], Future):
                self.snapshot[1].result()
            protrain.load_checkpoint(self.snapshot[0], self.model, self.optimizer)
            return
        self.model.load_state_dict(self.snapshot[0])
        if with_optimizer:
            self.optimizer.load_state_dict(self.snapshot[1])

    def resume(self, spec: Spec, folder: Path) -> None:
        protrain.save_checkpoint(folder, self.model, self.optimizer, scheduler=self.scheduler)
        before, scheduler = self.model, self.scheduler
        self._wrap(spec)
        if scheduler is not None:
            self.schedule(scheduler.kind)
        protrain.load_checkpoint(folder, self.model, self.optimizer, scheduler=self.scheduler)
        for old, new in zip(before.parameters(), self.model.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        for old, new in zip(before.modules(), self.model.modules(), strict=True):
            new.training = old.training
            if isinstance(old, Adapter):
                new.used = old.used

    def scale_gradient(self, index: int) -> bool:
        gradient = self.parameter(index).grad
        if gradient is not None:
            gradient.mul_(0.5)
        return gradient is not None

    def scale_gradients(self, factor: float) -> bool:
        found = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter in found:
            parameter.grad *= factor
        return bool(found)

    def gradient_norm(self, index: int) -> list[Tensor]:
        gradient = self.parameter(index).grad
        return [] if gradient is None else [gradient.norm().clone()]

    def clip_by_torch(self, max_norm: float) -> list[Tensor]:
        if all(parameter.grad is None for parameter in self.model.parameters()):
            return []
        return [nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).clone()]

    def whole(self) -> AbstractContextManager[None]:
        return protrain.full_parameters(self.model)

    def drop_gradients_of(self, block: int) -> None:
        self.model.blocks[block].zero_grad()

    def copy_block(self, source: int, target: int) -> None:
        self.model.blocks[target].load_state_dict(self.model.blocks[source].state_dict())

    def drop_gradient(self, index: int) -> bool:
        parameter = self.parameter(index)
        is_there = parameter.grad is not None
        parameter.grad = None
        return is_there
