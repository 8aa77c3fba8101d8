"""What is asked of the gradients of a step before it is made: their norm, and what they are multiplied by.

[Note: torch's own clipping] ``.grad`` is a stand-in (:mod:`protrain.engine.gradients.proxy`) that answers what
``torch.nn.utils.clip_grad_norm_`` asks: the norm of each gradient, then to multiply each by one and the same factor.
The update has one factor for all, so every gradient must have got it by the time of ``step()``. The norm of norms that
torch makes in fp32 is not that of all squares at once to the last bit, but like that the same under every plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.engine import Engine
from protrain.optim.loss_scale import LossScale


@dataclass
class _Factor:
    """What gradients were multiplied by, from outside."""

    given: Any  # the number, or the tensor
    version: int | None  # of the tensor, which may be changed in place
    value: Tensor  # of then
    indices: set[int]  # of the parameters that got it


class Clipping:
    """The norm and the factor of one step's gradients; reset by ``zero_grad``.

    An object of its own: wrappers of other libraries that take an optimizer's class as their own run its methods on
    themselves, and what these set would be theirs alone.
    """

    def __init__(self, engine: Engine, loss_scale: LossScale | None, *, refused: bool) -> None:
        self._engine = engine
        self._loss_scale = loss_scale
        self._refused = refused  # updates are made inside backward
        self._norm_squared: Tensor | None = None
        self._norms: dict[int, Tensor] = {}
        self._coefficient: Tensor | None = None  # 0-d fp32 on the device
        self._multiplied: list[_Factor] = []
        engine.gradient_norm = self.gradient_norm
        engine.multiply_gradient = self.multiply_gradient

    @property
    def has_begun(self) -> bool:
        """Whether a factor is known, which holds for all gradients of the step."""
        return self._coefficient is not None or bool(self._multiplied)

    def reset(self) -> None:
        """Forget everything: there are no gradients."""
        self.gradients_arrived()
        self._coefficient = None
        self._multiplied = []

    def gradients_arrived(self) -> None:
        """Norms are those of other gradients now."""
        self._norm_squared = None
        self._norms = {}

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """Multiply by what brings the norm to ``max_norm`` at most. Returns the norm before: 0-d fp32 on the device."""
        self._check("clip_grad_norm_()")
        norm = self._unscaled(self._sum_of_squares())
        coefficient = self.coefficient()
        norm = norm if coefficient is None else norm * coefficient
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        self._multiply(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
        return norm

    def need_gradients(self, what: str, index: int | None = None) -> None:
        """MisuseError where there are none for ``what``, or none of parameter ``index``, or some were set to None."""
        self._engine.abandon_backward()
        gradients, members = self._engine.gradients, self._engine.members
        if not (any(gradients.present) if index is None else gradients.present[index]):
            name = "gradients" if index is None else f"the gradient of {members[index].name}"
            raise MisuseError(f"{what} without {name}: call loss.backward() first")
        if gradients.forgotten:
            raise MisuseError(
                f"{what} after .grad of {len(gradients.forgotten)} parameters was set to None, of "
                f"{members[min(gradients.forgotten)].name} among them, and that of others was not: clear all of them, "
                "as optimizer.zero_grad() does, and set requires_grad=False for what is not to be trained"
            )

    def is_finite(self) -> bool:
        """Whether all gradients are. Waits for the device."""
        return bool(torch.isfinite(self._sum_of_squares()))

    def coefficient(self) -> Tensor | None:
        """What all gradients are multiplied by: 0-d fp32 on the device. MisuseError where some are and others not."""
        present = self._engine.gradients.present
        for factor in self._multiplied:
            missing = [m.name for m in self._engine.members if present[m.index] and m.index not in factor.indices]
            if missing:
                raise MisuseError(
                    f"{len(factor.indices)} gradients were multiplied by a factor and {len(missing)} were not, that of "
                    f"{missing[0]} among them: ProTrain multiplies all or none. Clip all of the model's parameters at "
                    "once, or clear the gradients with optimizer.zero_grad()"
                )
        for factor in self._multiplied:
            self._multiply(factor.value)
        self._multiplied = []
        return self._coefficient

    def gradient_norm(self, index: int) -> Tensor:
        """The 2-norm of the gradient of parameter ``index``, for ``.grad.norm()``: 0-d fp32 on the device."""
        self._check("the norm of a gradient", index)
        if not self._norms:
            # All at once: a few launches, where one a parameter would take milliseconds.
            indices, squares = self._engine.gradients.sums_of_squares()
            self._norms = dict(zip(indices, self._unscaled(squares).unbind(), strict=True))
        norm = self._norms[index]
        for value in (self._coefficient, *(factor.value for factor in self._multiplied if index in factor.indices)):
            norm = norm if value is None else norm * value
        return norm

    def multiply_gradient(self, index: int, factor: Tensor | float) -> None:
        """``.grad.mul_(factor)`` of parameter ``index``; a number, or 0-d."""
        self._check("to multiply a gradient", index)
        version = factor._version if isinstance(factor, Tensor) and not factor.is_inference() else None
        for known in self._multiplied:
            if known.version != version or index in known.indices:
                continue
            # Tensors are not compared: that would wait for the device.
            numbers = not isinstance(known.given, Tensor) and not isinstance(factor, Tensor)
            if known.given is factor or (numbers and known.given == factor):
                known.indices.add(index)
                return
        if isinstance(factor, Tensor):
            value = factor.detach().to(self._engine.device, torch.float32, copy=True)
        else:
            factor = float(factor)
            value = torch.full((), factor, dtype=torch.float32, device=self._engine.device)
        self._multiplied.append(_Factor(factor, version, value, {index}))

    def _sum_of_squares(self) -> Tensor:
        if self._norm_squared is None:
            self._norm_squared = self._engine.gradients.norm_squared()
        return self._norm_squared

    def _multiply(self, factor: Tensor) -> None:
        self._coefficient = factor if self._coefficient is None else self._coefficient * factor

    def _unscaled(self, squares: Tensor) -> Tensor:
        norm = squares.sqrt().float()
        return norm if self._loss_scale is None else norm / self._loss_scale.used

    def _check(self, what: str, index: int | None = None) -> None:
        if self._refused:
            raise MisuseError(
                f"{what} with step_during_backward=True, whose updates are made inside backward: wrap with "
                "step_during_backward=False, which overlaps too"
            )
        self._engine.streams.refuse_another()
        self.need_gradients(what, index)
