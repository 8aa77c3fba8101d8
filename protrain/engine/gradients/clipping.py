"""The loss scale of float16, the norm of a step's gradients, and the factor that the update multiplies them by.

[Note: torch's own clipping] ``.grad`` is a stand-in (``protrain.engine.weights.handle``) that supports what
``torch.nn.utils.clip_grad_norm_`` does: it asks each gradient for its norm, and then multiplies each by one and the
same factor. The update has one factor for all gradients, so every gradient must have got the factor by the time of
``step()``. torch computes the norm of norms in fp32. That may differ in the last bit from the root of all squares
summed at once, but it is the same under every plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protrain.common.errors import MisuseError, warn_user
from protrain.engine.gradients.gradients import Gradients
from protrain.engine.gradients.reduction import SquareSums

_INITIAL = 2.0**16
_SMALLEST, _LARGEST = 2.0**-24, 2.0**24
_GROWTH_INTERVAL = 2000  # finite steps before the scale doubles, as in torch.amp.GradScaler


@dataclass
class LossScale:
    """A loss scale that is always a power of two, so that scaling and unscaling are exact."""

    scale: float = _INITIAL  # of the next backward
    used: float = _INITIAL  # of the last backward, whose gradients step() applies
    is_used: bool = False  # whether the running backward uses it
    finite_steps: int = 0
    skipped: int = 0

    @contextmanager
    def for_backward(self) -> Iterator[float]:
        """Yield the factor on the loss for a backward that runs inside."""
        self.used = self.scale
        self.is_used = True
        try:
            yield self.scale
        finally:
            self.is_used = False

    def warn_of_smallest(self) -> None:
        """Warn if gradients are not finite although the scale cannot be smaller."""
        if self.scale == _SMALLEST:
            warn_user(
                f"{self.skipped + 1} steps were skipped: gradients are not finite in float16 however small the "
                "loss is scaled; look at the loss, or train in bfloat16"
            )

    def count_skipped(self) -> None:
        """A step is left out, as its gradients are not finite."""
        self.scale = max(self.scale / 2, _SMALLEST)
        self.finite_steps = 0
        self.skipped += 1

    def count_step(self) -> None:
        """A step is carried out."""
        self.finite_steps += 1
        if self.finite_steps == _GROWTH_INTERVAL:
            self.scale = min(self.scale * 2, _LARGEST)
            self.finite_steps = 0

    def state(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {"scale": self.scale, "finite_steps": self.finite_steps, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Set what ``state`` returned."""
        self.scale = float(state["scale"])
        self.finite_steps, self.skipped = int(state["finite_steps"]), int(state["skipped"])


class Clipping:
    """The norm of one step's gradients and their factor. ``zero_grad`` resets both."""

    def __init__(self, gradients: Gradients, loss_scale: LossScale | None) -> None:
        self._gradients = gradients
        self._loss_scale = loss_scale
        self._factor: Tensor | None = None  # of all gradients: 0-d, fp32, on the device
        # By torch's clipping, which multiplies one gradient after the other and has to reach all of them: its factors,
        # each as it was given and as a 0-d fp32 tensor on the device, and those of each parameter, in order.
        self._factors: dict[Any, tuple[Any, Tensor]] = {}
        self._factors_of: dict[int, list[Any]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a factor was set, which applies to all gradients of the step."""
        return self._factor is not None or bool(self._factors)

    def reset(self) -> None:
        """Forget everything, because there are no gradients any more."""
        self._factor = None
        self._factors, self._factors_of = {}, {}

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``.

        Returns:
            The norm before, as a 0-d fp32 tensor on the device.
        """
        norm = self._unscaled(self._settled_squares().total().sqrt().float())
        factor = self.factor()
        norm = norm if factor is None else norm * factor
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        self._multiply(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
        return norm

    def is_finite(self) -> bool:
        """Whether all gradients are finite. It waits for the device."""
        return bool(torch.isfinite(self._settled_squares().total()))

    def factor(self) -> Tensor | None:
        """The factor of all gradients: a 0-d fp32 tensor on the device, or None.

        Raises:
            MisuseError: some gradients were multiplied by a factor and others were not.
        """
        if not self._factors:
            return self._factor
        present = self._gradients.present
        factors_of = {m.name: self._factors_of.get(m.index, []) for m in self._gradients.members if present[m.index]}
        usual = max(factors_of.values(), key=len)
        missing = [name for name, factors in factors_of.items() if factors != usual]
        if missing:
            raise MisuseError(
                f"{len(factors_of) - len(missing)} gradients were multiplied by a factor and {len(missing)} were not, "
                f"that of {missing[0]} among them: ProTrain multiplies all or none. Clip all of the model's parameters "
                "at once, change single gradients in parameter.register_post_accumulate_grad_hook, or in "
                "parameter.register_hook where a step has several backward() calls, or clear the gradients with "
                "optimizer.zero_grad()"
            )
        for key in usual:
            self._multiply(self._factors[key][1])
        self._factors, self._factors_of = {}, {}
        return self._factor

    def gradient_norm(self, index: int) -> Tensor:
        """The 2-norm of the gradient of parameter ``index``, for ``.grad.norm()``: a 0-d fp32 tensor on the device."""
        norm = self._unscaled(self._settled_squares().norm_of(index))
        for value in (self._factor, *(self._factors[key][1] for key in self._factors_of.get(index, []))):
            norm = norm if value is None else norm * value
        return norm

    def multiply_gradient(self, index: int, factor: Tensor | float) -> None:
        """Multiply the gradient of parameter ``index`` by a number or a 0-d tensor, for ``.grad.mul_(factor)``."""
        key: Any = factor
        if isinstance(
            factor, Tensor
        ):  # its value is not compared, as that waits for the device, and may change in place
            key = id(factor), 0 if factor.is_inference() else factor._version
        if key not in self._factors:
            value = torch.as_tensor(factor, dtype=torch.float32).detach().to(self._gradients.device, copy=True)
            self._factors[key] = factor, value
        self._factors_of.setdefault(index, []).append(key)

    def _settled_squares(self) -> SquareSums:
        self._gradients.reduction.settle()
        return self._gradients.squares

    def _multiply(self, factor: Tensor) -> None:
        self._factor = factor if self._factor is None else self._factor * factor

    def _unscaled(self, norm: Tensor) -> Tensor:
        return norm if self._loss_scale is None else norm / self._loss_scale.used
