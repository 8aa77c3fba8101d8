"""The two sides of a random script: the plain loop, and the same model under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import protrain
from protrain.optim.optimizer import ProTrainOptimizer
from protrain_kernels import sum_of_squares_reference
from tests.engine.harness import Spec, adamw, seeded, wrap_under
from tests.engine.plain_loop import PlainOptimizer, prepare_plain, rounded
from tests.engine.residual import Model
from tests.random_scripts.models import DEPTH, MODELS, WIDTH, batch

CPU = torch.device("cpu")
DECAY = 0.75  # of averaged weights


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

    def __str__(self) -> str:
        marks = f"{' inside' if self.inside else ''}{f' on {self.ranks} ranks' if self.ranks > 1 else ''}"
        marks += f"{' narrow moments' if self.narrow else ''} accumulation={self.accumulation}"
        marks += " without an example batch" if self.late else ""
        return f"{self.model} {self.dtype} {self.spec}{marks}"

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
        self.averages: Any = None

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the step."""
        self.optimizer.zero_grad(set_to_none)

    def give_up(self) -> None:
        """Forget the step, and losses whose backward has not come."""
        self.pending.clear()
        self.zero_grad()

    def parameter(self, index: int) -> nn.Parameter:
        """In definition order, beginning again after the last."""
        found = list(self.model.parameters())
        return found[index % len(found)]

    def named(self, index: int) -> str:
        """The name of ``parameter(index)``."""
        names = [name for name, _ in self.model.named_parameters()]
        return names[index % len(names)]


class Plain(Side):
    """The loop that defines the right values."""

    optimizer: PlainOptimizer

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        model = case.make()
        moments = torch.bfloat16 if case.narrow else torch.float32
        how: dict[str, Any] = {"device": CPU, "dtype": case.dtype, "moment_dtype": moments}
        self.model, self.optimizer = prepare_plain(model, adamw(model), **how)
        self.averages = PlainAverages(self.optimizer)
        self._pending: list[list[Tensor]] = [[] for _ in range(case.ranks)]

    def act_for(self, rank: int) -> None:
        """The next action is that of ``rank``."""
        self.pending = self._pending[rank]

    def give_up(self) -> None:
        """Forget the step, and what all ranks have left open."""
        for pending in self._pending:
            pending.clear()
        super().give_up()

    def edit(self, index: int, factor: float, *, outer: bool = False) -> None:
        """Multiply a weight, perhaps inside another context for edits."""
        self.load_some({self.named(index): self.parameter(index).data * factor})

    def step_with(self, closure: Callable[[], Tensor]) -> None:
        """A step whose backward is in ``closure``."""
        closure()
        self.optimizer.step()

    def read_all(self) -> list[Tensor]:
        """All weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def load_some(self, weights: dict[str, Tensor]) -> None:
        """Write weights. Elements that stay as they are keep their masters."""
        for name, value in weights.items():
            weight, master = self.optimizer.trained[name].data, self.optimizer.masters[name]
            bits = torch.int32 if weight.dtype is torch.float32 else torch.int16
            master.copy_(torch.where(weight.view(bits) == value.view(bits), master, value.float()))
            weight.copy_(value)

    def edit_outside(self, index: int, how: str) -> None:
        """Nothing, because ProTrain refuses to write a weight outside of its contexts."""

    def step_with_invalid(self, group: int) -> None:
        """Nothing, because ProTrain refuses a step with an invalid hyperparameter."""

    def keep(self, how: str, folder: Path) -> None:
        """Remember the training as it is, ``how`` only on the other side. A checkpoint has the masters, too."""
        o = self.optimizer
        copies = [{name: t.clone() for name, t in each.items()} for each in (o.masters, o.exp_avg, o.exp_avg_sq)]
        buffers = {name: value.clone() for name, value in self.model.named_buffers()}
        groups = [{**group} for group in o.param_groups]
        self.snapshot = copies, dict(o.steps), buffers, groups, (o.loss_scale, o.skipped_steps), how

    def go_back(self, *, with_optimizer: bool) -> None:
        """Load what ``keep`` has remembered."""
        o = self.optimizer
        copies, steps, buffers, groups, scale, how = self.snapshot
        for name, value in self.model.named_buffers():
            value.copy_(buffers[name])
        self.load_some({name: rounded(copies[0][name], o.dtype) for name in o.trained})
        if with_optimizer or how != "states":
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
        sums, name = self.optimizer.sums, self.named(index)
        if name in sums:
            sums[name] = sums[name] * 0.5
        return name in sums

    def scale_gradients(self, factor: float) -> bool:
        """Multiply all gradients. Returns whether there are any."""
        o = self.optimizer
        if o.sums:
            o.coefficient = torch.tensor(factor) * (1.0 if o.coefficient is None else o.coefficient)
        return bool(o.sums)

    def gradient_norm(self, index: int) -> list[Tensor]:
        """The norm of a gradient, if there is one."""
        return self._norms([self.named(index)])

    def clip_by_torch(self, max_norm: float) -> list[Tensor]:
        """Clip by the norm of the norms of the gradients. Returns it, if there are gradients."""
        norms = self._norms([name for name, _ in self.model.named_parameters()])
        if not norms:
            return []
        norm = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        before = self.optimizer.coefficient
        self.optimizer.coefficient = factor if before is None else before * factor
        return [norm]

    def _norms(self, names: list[str]) -> list[Tensor]:
        o, found = self.optimizer, []
        for gradient in (o.gradients[name] for name in names if name in o.sums):
            norm = sum_of_squares_reference(gradient.contiguous().view(-1)).double().sum().sqrt().float()
            norm = norm / o.loss_scale if o.dtype is torch.float16 else norm
            found.append(norm if o.coefficient is None else norm * o.coefficient)
        return found

    def drop_gradient(self, index: int) -> bool:
        """Forget a gradient. Returns whether there was one."""
        name = self.named(index)
        self.optimizer.zeroed.discard(name)
        return self.optimizer.sums.pop(name, None) is not None


class PlainAverages:
    """``protrain.AveragedWeights`` of the plain loop."""

    def __init__(self, optimizer: PlainOptimizer) -> None:
        self._optimizer = optimizer
        self._own: dict[str, Tensor] = {}

    def update(self) -> None:
        for name, master in self._optimizer.masters.items():
            self._own[name] = torch.lerp(self._own[name], master, 1 - DECAY) if name in self._own else master.clone()

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._own.items()}

    def _exchange(self) -> None:
        o = self._optimizer
        for name, parameter in o.trained.items():
            master = o.masters[name].clone()
            o.masters[name].copy_(self._own[name])
            self._own[name] = master
            parameter.data.copy_(rounded(o.masters[name], o.dtype))


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
        self.averages = protrain.AveragedWeights(self.model, DECAY)

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

    def read_all(self) -> list[Tensor]:
        with protrain.full_parameters(self.model):
            return [parameter.detach().clone() for parameter in self.model.parameters()]

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
            elif how == "foreach":
                with torch.no_grad():
                    torch._foreach_mul_(list(self.model.parameters()), 0.5)
            else:
                nn.init.zeros_(parameter)
        except protrain.MisuseError:
            return
        raise AssertionError("a weight could be written")

    def step_with_invalid(self, group: int) -> None:
        options = self.optimizer.param_groups[group]
        before, options["lr"] = options["lr"], -1.0
        try:
            self.optimizer.step()
        except (protrain.MisuseError, ValueError):
            return
        finally:
            options["lr"] = before
        raise AssertionError("the step was made")

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
        protrain.save_checkpoint(folder, self.model, self.optimizer)
        before, averages = self.model, self.averages.state_dict()
        self._wrap(spec)
        protrain.load_checkpoint(folder, self.model, self.optimizer)
        for old, new in zip(before.parameters(), self.model.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        for old, new in zip(before.modules(), self.model.modules(), strict=True):
            new.training = old.training
        if averages:
            self.averages.load_state_dict(averages)

    def scale_gradient(self, index: int) -> bool:
        gradient = self.parameter(index).grad
        if gradient is not None:
            gradient.mul_(0.5)
        return gradient is not None

    def scale_gradients(self, factor: float) -> bool:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        for gradient in gradients:
            gradient.mul_(factor)
        return bool(gradients)

    def gradient_norm(self, index: int) -> list[Tensor]:
        gradient = self.parameter(index).grad
        return [] if gradient is None else [gradient.norm().clone()]

    def clip_by_torch(self, max_norm: float) -> list[Tensor]:
        if all(parameter.grad is None for parameter in self.model.parameters()):
            return []
        return [nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).clone()]

    def drop_gradient(self, index: int) -> bool:
        parameter = self.parameter(index)
        is_there = parameter.grad is not None
        parameter.grad = None
        return is_there
