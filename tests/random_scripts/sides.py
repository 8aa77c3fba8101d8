"""The two sides of a random script: the plain loop, and the same model under a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import protrain
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import Spec, adamw, seeded, wrap_under
from tests.engine.plain_loop import PlainOptimizer, prepare_plain, rounded
from tests.engine.residual import Model

CPU = torch.device("cpu")
WIDTH, DEPTH = 24, 4


class Tied(Model):
    """The last layer reads through the weight of the first, and one block is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return self.leave(x) + nn.functional.linear(x, self.enter.weight.t()).sum(-1, keepdim=True)


class Counting(Model):
    """It has a BatchNorm, and a buffer that counts its calls."""

    calls: Tensor

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x) * (1 + 0.01 * self.calls)


class Branching(Model):
    """It leaves out a block for batches of an odd size."""

    def forward(self, x: Tensor) -> Tensor:
        odd = x.shape[0] % 2
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if not (odd and index == 2):
                x = block(x)
        return self.leave(x)


MODELS: dict[str, Callable[[int, int], Model]] = {
    "residual": Model,
    "tied": Tied,
    "counting": Counting,
    "branching": Branching,
}


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

    def __str__(self) -> str:
        marks = f"{' inside' if self.inside else ''}{f' on {self.ranks} ranks' if self.ranks > 1 else ''}"
        marks += f"{' narrow moments' if self.narrow else ''} accumulation={self.accumulation}"
        return f"{self.model} {self.dtype} {self.spec}{marks}"

    def make(self) -> Model:
        """The model, with the same weights each time."""
        with seeded():
            return MODELS[self.model](WIDTH, DEPTH)


def batch(seed: int, size: int = 8) -> Tensor:
    """Numbers [size, 8] of ``seed``."""
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))


class Side:
    """A model and its optimizer, with what a script has left open."""

    model: Any
    optimizer: Any

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pending: list[Tensor] = []  # losses whose backward comes later
        self.handles: list[Any] = []  # of hooks
        self.snapshot: Any = None
        self.is_clipped = False

    def zero_grad(self) -> None:
        """Forget the step."""
        self.optimizer.zero_grad()
        self.is_clipped = False

    def give_up(self) -> None:
        """Forget the step, and losses whose backward has not come."""
        self.pending.clear()
        self.zero_grad()

    def parameter(self, index: int) -> nn.Parameter:
        """In definition order."""
        return list(self.model.parameters())[index]


class Plain(Side):
    """The loop that defines the right values."""

    optimizer: PlainOptimizer

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        model = case.make()
        moments = torch.bfloat16 if case.narrow else torch.float32
        how: dict[str, Any] = {"device": CPU, "dtype": case.dtype, "moment_dtype": moments}
        self.model, self.optimizer = prepare_plain(model, adamw(model), **how)

    def edit(self, index: int, factor: float) -> None:
        """Multiply a weight."""
        name = [name for name, _ in self.model.named_parameters()][index]
        self._set(name, self.parameter(index).data * factor)

    def keep(self) -> None:
        """Remember the training as it is."""
        o = self.optimizer
        copies = [{name: t.clone() for name, t in each.items()} for each in (o.masters, o.exp_avg, o.exp_avg_sq)]
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        groups = [{**group} for group in o.param_groups]
        self.snapshot = copies, dict(o.steps), buffers, groups, (o.loss_scale, o.skipped_steps)

    def go_back(self, *, with_optimizer: bool) -> None:
        """Load what ``keep`` has remembered."""
        o = self.optimizer
        copies, steps, buffers, groups, scale = self.snapshot
        for name, value in self.model.named_buffers():
            value.copy_(buffers[name])
        for name in o.trained:  # the state of a model has no masters
            self._set(name, rounded(copies[0][name], o.dtype))
        if with_optimizer:
            for values, saved in zip((o.masters, o.exp_avg, o.exp_avg_sq), copies, strict=True):
                for name, value in values.items():
                    value.copy_(saved[name])
            o.steps.update(steps)
            o.loss_scale, o.skipped_steps = scale
            for group, saved in zip(o.param_groups, groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})

    def resume(self, spec: Spec, folder: Path) -> None:
        """Nothing: a training that goes on from a checkpoint is the same one."""

    def scale_gradient(self, index: int) -> bool:
        """Halve a gradient. Returns whether there is one."""
        name = [name for name, _ in self.model.named_parameters()][index]
        sums = self.optimizer.sums
        if name in sums:
            sums[name] = sums[name] * 0.5
        return name in sums

    def drop_gradient(self, index: int) -> bool:
        """Forget a gradient. Returns whether there was one."""
        name = [name for name, _ in self.model.named_parameters()][index]
        return self.optimizer.sums.pop(name, None) is not None

    def _set(self, name: str, value: Tensor) -> None:
        """Write a weight. Elements that stay as they are keep their masters."""
        weight, master = self.optimizer.trained[name].data, self.optimizer.masters[name]
        bits = torch.int32 if weight.dtype is torch.float32 else torch.int16
        master.copy_(torch.where(weight.view(bits) == value.view(bits), master, value.float()))
        weight.copy_(value)


class Wrapped(Side):
    """The training under a plan."""

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
        how = {"device": CPU, "dtype": case.dtype, **options}
        self.model, self.optimizer = wrap_under(spec, model, adamw(model), (batch(0),), **how)

    def edit(self, index: int, factor: float) -> None:
        """As of ``Plain``, and so are the methods below."""
        with protrain.full_parameters(self.model), torch.no_grad():
            self.parameter(index).mul_(factor)

    def keep(self) -> None:
        states = self.model.state_dict(), self.optimizer.state_dict()
        self.snapshot = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, states)

    def go_back(self, *, with_optimizer: bool) -> None:
        self.model.load_state_dict(self.snapshot[0])
        if with_optimizer:
            self.optimizer.load_state_dict(self.snapshot[1])

    def resume(self, spec: Spec, folder: Path) -> None:
        protrain.save_checkpoint(folder, self.model, self.optimizer)
        before = self.model
        self._wrap(spec)
        protrain.load_checkpoint(folder, self.model, self.optimizer)
        for old, new in zip(before.parameters(), self.model.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        for old, new in zip(before.modules(), self.model.modules(), strict=True):
            new.training = old.training

    def scale_gradient(self, index: int) -> bool:
        gradient = self.parameter(index).grad
        if gradient is not None:
            gradient.mul_(0.5)
        return gradient is not None

    def drop_gradient(self, index: int) -> bool:
        parameter = self.parameter(index)
        is_there = parameter.grad is not None
        parameter.grad = None
        return is_there
