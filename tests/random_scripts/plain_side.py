"""The side of a random script that defines the right values: the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protrain_kernels import sum_of_squares_reference
from tests.engine.harness import Spec, adamw
from tests.engine.plain_loop import PlainOptimizer, prepare_plain, rounded
from tests.random_scripts.sides import CPU, Case, Side


class Plain(Side):
    """The loop that defines the right values."""

    optimizer: PlainOptimizer

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        model = case.make()
        moments = torch.bfloat16 if case.narrow else torch.float32
        how: dict[str, Any] = {"device": CPU, "dtype": case.dtype, "moment_dtype": moments}
        self.model, self.optimizer = prepare_plain(model, adamw(model), **how)
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

    def load_some(self, weights: dict[str, Tensor]) -> None:
        """Write weights. Elements that stay as they are keep their masters."""
        for name, value in weights.items():
            if name in self._frozen:
                self.model.get_parameter(name).data.copy_(value)
                continue
            weight, master = self.optimizer.trained[name].data, self.optimizer.masters[name]
            bits = torch.int32 if weight.dtype is torch.float32 else torch.int16
            master.copy_(torch.where(weight.view(bits) == value.view(bits), master, value.float()))
            weight.copy_(value)

    def edit_outside(self, index: int, how: str) -> None:
        """Nothing, because ProTrain refuses to write a weight outside of its contexts."""

    def keep(self, how: str, folder: Path) -> None:
        """Remember the training as it is, ``how`` only on the other side. A checkpoint has the masters, too."""
        o = self.optimizer
        copies = [{name: t.clone() for name, t in each.items()} for each in (o.masters, o.exp_avg, o.exp_avg_sq)]
        untrained = {name: value.clone() for name, value in self._untrained()}
        groups = [{**group} for group in o.param_groups]
        self.snapshot = copies, dict(o.steps), untrained, groups, (o.loss_scale, o.skipped_steps), how

    def go_back(self, *, with_optimizer: bool) -> None:
        """Load what ``keep`` has remembered."""
        o = self.optimizer
        copies, steps, untrained, groups, scale, how = self.snapshot
        for name, value in self._untrained():
            value.copy_(untrained[name])
        self.load_some({name: rounded(copies[0][name], o.dtype) for name in o.trained})
        if with_optimizer or how != "states":
            for values, saved in zip((o.masters, o.exp_avg, o.exp_avg_sq), copies, strict=True):
                for name, value in values.items():
                    value.copy_(saved[name])
            o.steps.update(steps)
            o.loss_scale, o.skipped_steps = scale
            for group, saved in zip(o.param_groups, groups, strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})

    def _untrained(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that are never trained, which adapters are merged into, and the buffers."""
        yield from ((name, self.model.get_parameter(name).data) for name in self._frozen)
        yield from self.model.named_buffers()

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

    def drop_gradients_of(self, block: int) -> None:
        """Forget the gradients of a block."""
        mine = {id(parameter) for parameter in self.model.blocks[block].parameters()}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in mine:
                self.optimizer.zeroed.discard(name)
                self.optimizer.sums.pop(name, None)

    def copy_block(self, source: int, target: int) -> None:
        """Load the weights and buffers of a block into another."""
        blocks, names = self.model.blocks, {id(p): name for name, p in self.model.named_parameters()}
        saved = {name: value.clone() for name, value in blocks[source].state_dict().items()}
        for name, parameter in blocks[target].named_parameters():
            self.load_some({names[id(parameter)]: saved[name]})
        for name, buffer in blocks[target].named_buffers():
            buffer.copy_(saved[name])

    def drop_gradient(self, index: int) -> bool:
        """Forget a gradient, and with the last one how they were clipped. Returns whether there was one."""
        o, name = self.optimizer, self.named(index)
        o.zeroed.discard(name)
        was_there = o.sums.pop(name, None) is not None
        if not o.sums:
            o.coefficient = None
        return was_there
