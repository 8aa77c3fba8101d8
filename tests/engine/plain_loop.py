"""The plain training loop that every plan must equal bit for bit: an ordinary model, autograd, and reference operators.

Nothing of the engine is used here. The loop defines the training algorithm:

- weights are the fp32 masters rounded to the training dtype: bfloat16 to nearest with ties away from zero, float16 to
  nearest even, float32 not at all; frozen ones have no master and are rounded to nearest even;
- a step's gradient is that of its one backward() in the weight's dtype; when there are several, they are added in fp32
  in order, and the finished sum is rounded once to the weight's dtype, to nearest even: norm and step see only that;
- the norm is the square root of the fp64 sum of fp32 partial sums per tile, parameters in definition order;
- float16 has a dynamic loss scale, and a step with a gradient that is not finite is skipped;
- the step is ``adam_reference`` on the fp32 master of each parameter that has a gradient, with moments in fp32 or bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from protrain.common.batch import cast_inputs, move, training_arguments
from protrain.common.parameters import DTYPES
from protrain_kernels import adam_reference, adam_scalars, split, sum_of_squares_reference, tiles

Model = TypeVar("Model", bound=nn.Module)


def prepare_plain(
    model: Model,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    moment_dtype: torch.dtype = torch.float32,
) -> tuple[Model, PlainOptimizer]:
    """``model`` and ``optimizer`` for a plain loop that reads like the one around ``protrain.wrap``."""
    masters = {}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in model.parameters():
        if parameter.dtype in DTYPES.values() and nn.Parameter in type(parameter).__mro__:
            masters[id(parameter)] = parameter.data.to(device, torch.float32, copy=True)
            is_trained = parameter.requires_grad and id(parameter) in held
            parameter.data = (rounded if is_trained else cast)(masters[id(parameter)], dtype)
        else:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)

    def place(_: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = move((args, kwargs), device, lambda tensor: tensor.to(device))
        args, kwargs = cast_inputs(args, kwargs, dtype)
        return args, training_arguments(model, kwargs) if torch.is_grad_enabled() else kwargs

    model.register_forward_pre_hook(place, with_kwargs=True)
    vars(model).update(no_sync=nullcontext)
    return model.train(), PlainOptimizer(model, optimizer, masters, dtype, moment_dtype)


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype`` that follows from an fp32 master."""
    return split(master)[0] if dtype is torch.bfloat16 else cast(master, dtype)


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A frozen weight, which has no master: as torch rounds."""
    return value.to(dtype, copy=True)


class PlainOptimizer(torch.optim.Optimizer):
    """The step of the plain loop, with the methods of the optimizer that ``protrain.wrap`` returns."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        masters: dict[int, Tensor],
        dtype: torch.dtype,
        moment_dtype: torch.dtype,
    ) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.decoupled = isinstance(optimizer, torch.optim.AdamW)
        self.dtype = dtype
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) in held}
        self.masters = {name: masters[id(parameter)] for name, parameter in self.trained.items()}
        self.exp_avg, self.exp_avg_sq = (
            {name: torch.zeros_like(master, dtype=moment_dtype) for name, master in self.masters.items()}
            for _ in range(2)
        )
        self.steps = dict.fromkeys(self.trained, 0)
        self.sums: dict[str, Tensor] = {}  # fp32 where there were several backwards
        self.zeroed: set[str] = set()  # parameters to which zero_grad(set_to_none=False) has left zeros
        self.coefficient: Tensor | None = None
        self.loss_scale = 2.0**16 if dtype is torch.float16 else 1.0
        self.skipped_steps = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._collector(name))

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            if parameter.grad is None:  # the parameter was frozen after forward
                return
            before, gradient = self.sums.get(name), parameter.grad.detach()
            parameter.grad = None
            if name in self.trained:
                self.sums[name] = gradient if before is None else before.float() + gradient.float()

        return collect

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The finished gradient of each parameter that has one, in the dtype of the weights."""
        return {name: total.to(self.dtype) for name, total in self.sums.items()}

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, scaled for float16."""
        (loss.float() * self.loss_scale if self.dtype is torch.float16 else loss).backward()

    def norm_squared(self) -> Tensor:
        """fp64 sum of squares of the step's gradients, still scaled."""
        partials, gradients = [], self.gradients
        for name, parameter in self.trained.items():
            gradient = gradients.get(name)
            if gradient is None:
                partials.append(torch.zeros(tiles(parameter.numel()), device=parameter.device))
            else:
                partials.append(sum_of_squares_reference(gradient.contiguous().view(-1)))
        return torch.cat(partials).double().sum()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the step's gradients to a global norm of at most ``max_norm``; returns the norm before."""
        norm = self.norm_squared().sqrt().float()
        if self.dtype is torch.float16:
            norm = norm / self.loss_scale
        if self.coefficient is not None:  # clipped before
            norm = norm * self.coefficient
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self.coefficient = factor if self.coefficient is None else self.coefficient * factor
        return norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        scale = self.coefficient
        if self.dtype is torch.float16:
            if not math.isfinite(self.norm_squared().item()):
                self.loss_scale = max(self.loss_scale / 2, 1.0)
                self.skipped_steps += 1
                return None
            inverse = torch.tensor(1.0 / self.loss_scale, device=next(iter(self.masters.values())).device)
            scale = inverse if scale is None else scale * inverse
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        zeros = {name: torch.zeros_like(self.trained[name]) for name in self.zeroed}
        for name, gradient in {**zeros, **self.gradients}.items():
            parameter, master = self.trained[name], self.masters[name]
            group = groups[id(parameter)]
            self.steps[name] += 1
            scalars = adam_scalars(
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=self.steps[name],
                decoupled=self.decoupled,
            )
            adam_reference(master, None, self.exp_avg[name], self.exp_avg_sq[name], gradient, scalars, scale=scale)
            parameter.data.copy_(rounded(master, self.dtype))
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the step's gradients, or leave zeros in their place."""
        self.zeroed = set() if set_to_none else self.zeroed | self.sums.keys()
        self.sums.clear()
        self.coefficient = None

    def export_parameter(self, name: str) -> dict[str, Tensor]:
        """The state of one trained parameter, in the form of the wrapped optimizer's method."""
        return {
            "master": self.masters[name].cpu(),
            "exp_avg": self.exp_avg[name].cpu().float(),
            "exp_avg_sq": self.exp_avg_sq[name].cpu().float(),
            "step": torch.tensor(float(self.steps[name])),
        }
