"""The batch that the plan was made for, and whether there is memory for a larger one.

A plan for a model that nearly fills the device leaves no memory for larger batches. One for a small model leaves most
of it. So a larger batch trains if its activations fit what the plan leaves, and is refused before its forward if not.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from protrain.common import batch as batches
from protrain.common.errors import MisuseError
from protrain.common.quantities import format_bytes
from protrain.engine.states.arena import EngineMemory
from protrain.profiler.model_profile import ModelProfile

_REMEDY = "pass an example_batch to protrain.wrap that is as long in every dimension as any batch of the training"


class PlannedBatch:
    """The shapes of the planned batch.

    Args:
        profile: of the model and that batch.
        model: the model.
        memory: of the engine. A larger batch takes what it needs of ``free_device_bytes`` for good, as later ones may
            be as large.
        names: of the arguments that the model's forward takes by position.
    """

    def __init__(self, profile: ModelProfile, model: nn.Module, memory: EngineMemory, names: list[str]) -> None:
        self._names = names
        self._tokens = profile.tokens
        self._shapes = {self._by_keyword(name): shape for name, shape in profile.batch_shapes.items()}
        # Recurrent and attention modules of torch have batch_first=False when sequences come first.
        self._rows_first = all(getattr(module, "batch_first", True) for module in model.modules())
        self._memory = memory
        self._planned_bytes = memory.activation_bytes

    def admit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make sure that there is memory for a training batch, the arguments of the model.

        Raises:
            MisuseError: it may need more memory than there is. An OOM later would lose the step.
        """
        given = {self._by_keyword(str(at)): value for at, value in enumerate(args)} | kwargs
        tensors = dict(batches.named_tensors(given))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        growths = {
            name: batches.growth(shape, self._shapes[name], rows_first=self._rows_first)
            for name, shape in shapes.items()
            if name in self._shapes
        }
        if growths:
            name = max(growths, key=growths.__getitem__)
            growth = growths[name]
            what = f"{name} has shape {shapes[name]}, larger than the {self._shapes[name]} that the plan was made for"
        else:
            tokens = batches.tokens(tensors) if tensors else 0
            growth = max(1.0, tokens / self._tokens) ** 2  # as if all of them were in one sequence
            what = f"the batch has {tokens} tokens, more than the {self._tokens} that the plan was made for"
        memory = self._memory
        more_bytes = math.ceil(growth * self._planned_bytes) - memory.activation_bytes
        if more_bytes <= 0:
            return
        if more_bytes > memory.free_device_bytes:
            raise MisuseError(
                f"{what}: it may need {format_bytes(more_bytes)} more of device memory, and "
                f"{format_bytes(memory.free_device_bytes)} are free; {_REMEDY}"
            )
        memory.free_device_bytes -= more_bytes
        memory.activation_bytes += more_bytes

    def _by_keyword(self, name: str) -> str:
        """``name`` of an input, which has dots if it is nested, with its keyword in place of its position."""
        position, dot, rest = name.partition(".")
        known = position.isdecimal() and int(position) < len(self._names)
        return (self._names[int(position)] if known else position) + dot + rest
