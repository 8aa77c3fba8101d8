"""The dynamic loss scale of float16. It grows while gradients are finite, and is halved when they overflow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from protrain.common.warned import warn_user

_INITIAL = 2.0**16
_SMALLEST, _LARGEST = 2.0**-24, 2.0**24
_GROWTH_INTERVAL = 2000  # finite steps before the scale doubles, as in torch.amp.GradScaler


class LossScale:
    """A loss scale that is always a power of two, so that scaling and unscaling are exact."""

    def __init__(self) -> None:
        self.scale = _INITIAL  # the scale of the next backward
        self.used = _INITIAL  # the scale of the last backward, whose gradients step() applies
        self.is_used = False  # whether the running backward uses it
        self.finite_steps = 0
        self.skipped = 0

    @contextmanager
    def for_backward(self) -> Iterator[float]:
        """Yield the factor on the loss for a backward that runs inside."""
        self.used = self.scale
        self.is_used = True
        try:
            yield self.scale
        finally:
            self.is_used = False

    def update(self, finite: bool) -> bool:
        """Note whether this step's gradients are finite. Returns whether to apply them."""
        if not finite:
            if self.scale == _SMALLEST:
                warn_user(
                    f"{self.skipped + 1} steps were skipped: gradients are not finite in float16 however small the "
                    "loss is scaled; look at the loss, or train in bfloat16"
                )
            self.scale = max(self.scale / 2, _SMALLEST)
            self.finite_steps = 0
            self.skipped += 1
            return False
        self.finite_steps += 1
        if self.finite_steps == _GROWTH_INTERVAL:
            self.scale = min(self.scale * 2, _LARGEST)
            self.finite_steps = 0
        return True

    def state(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {"scale": self.scale, "finite_steps": self.finite_steps, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Set what ``state`` returned."""
        self.scale = float(state["scale"])
        self.finite_steps = int(state["finite_steps"])
        self.skipped = int(state["skipped"])
