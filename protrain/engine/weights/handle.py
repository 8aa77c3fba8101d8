"""What a managed parameter knows of the engine that holds its weight and its gradient.

A parameter asks the engine for its weight, for the state of its gradient and for the norm of it. The questions are
listed in a protocol here, so that the classes of parameters need not import the engine, which imports them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from protrain.common.errors import MisuseError
from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Member
from protrain.engine.weights.buffers import BufferPool


class ParameterEngine(Protocol):
    """What a managed parameter asks of ``protrain.engine.engine.Engine``."""

    memory: EngineMemory
    placeholder: Tensor  # one NaN element on the device, which expands to any shape
    weights_version: int  # counts changes of weights
    all_read: bool  # whether every rank reads the same parameters now, as inside reads_of_all
    buffers: BufferPool
    updated_inside: set[int]  # chunks that the current backward has updated
    thawed: set[int]  # parameters that require a gradient now, and did not when the model was wrapped

    @property
    def members(self) -> Sequence[Member]:
        """All managed parameters."""

    def begin_backward(self) -> None:
        """Begin a backward, unless one runs already. This is called inside it."""

    def end_interrupted(self) -> None:
        """Clean up after a step that an error has ended. MisuseError in a forked process, which has no states."""

    def quiet(self) -> AbstractContextManager[None]:
        """A context in which nothing of the engine runs, so that the host may read and write states."""

    def gradient_ready(self, index: int) -> None:
        """Autograd has accumulated the whole gradient of parameter ``index``."""

    def gradient_pending(self, index: int) -> bool:
        """Whether parameter ``index`` has a gradient that no step has used."""

    def forget_gradient(self, index: int) -> None:
        """The user has set ``.grad`` of parameter ``index`` to None."""

    def gradient_norm(self, index: int) -> Tensor:
        """The 2-norm of the gradient of parameter ``index``."""

    def multiply_gradient(self, index: int, factor: Tensor | float) -> None:
        """The user has multiplied ``.grad`` of parameter ``index`` by ``factor``."""


class Handle:
    """The link from a managed parameter to the engine.

    The reference to the engine is weak, and so is that of the gradient hooks. Python's garbage collector does not see
    through a tensor that C++ holds, and a model that the user drops must free its chunks.
    """

    def __init__(self, name: str, index: int, engine: ParameterEngine, *, trainable: bool) -> None:
        self.name = name
        self.index = index
        self.trainable = trainable  # whether it required a gradient when the model was wrapped
        self.gradient_proxy: Tensor | None = None  # made when .grad is read first, as torch's clipping reads it often
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> ParameterEngine:
        """The engine. MisuseError when model and optimizer are gone."""
        engine = self._engine()
        if engine is None:
            raise MisuseError(f"{self.name} belongs to a model that no longer exists: keep the model that was wrapped")
        return engine

    def gradient_ready(self, _: Tensor) -> None:
        """The engine's own hook on the parameter, called after all others: autograd has accumulated its gradient."""
        self.engine.gradient_ready(self.index)

    @property
    def gradient_pending(self) -> bool:
        """Whether the parameter has a gradient that no step has used."""
        return self.engine.gradient_pending(self.index)
