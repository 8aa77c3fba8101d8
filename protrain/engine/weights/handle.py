"""What a managed parameter knows of the engine that holds its weight and its gradient.

A parameter asks the engine for its weight, for the state of its gradient and for the norm of it.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

from torch import Tensor

from protrain.common.errors import MisuseError

Engine: TypeAlias = Any  # protrain.engine.engine.Engine, which imports all files that ask it


class Handle:
    """The link from a managed parameter to the engine.

    The reference to the engine is weak, and so is that of the gradient hooks. Python's garbage collector does not see
    through a tensor that C++ holds, and a model that the user drops must free its chunks.
    """

    def __init__(self, name: str, index: int, engine: Engine, *, trainable: bool) -> None:
        self.name = name
        self.index = index
        self.trainable = trainable  # whether it required a gradient when the model was wrapped
        self.gradient_proxy: Tensor | None = None  # made when .grad is read first, as torch's clipping reads it often
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
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
