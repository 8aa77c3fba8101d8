"""The states of single parameters: what an optimizer over chunks gives and takes, one parameter at a time.

Checkpoints use it, so that they never hold the whole model a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.distributed.ranks import Ranks
from protrain.engine.engine import Engine
from protrain.engine.states import parameter_state
from protrain.engine.states.chunks import Member


class ParameterStates(torch.optim.Optimizer):
    """An optimizer whose states lie in the chunks of an engine."""

    ranks: Ranks
    _parameters: dict[str, nn.Parameter]  # all managed ones by name, in definition order
    _trained: dict[str, nn.Parameter]  # those that were trainable and in a group when the model was wrapped
    _by_name: dict[str, Member]
    _running: Engine | None  # None: the model was not called yet

    @property
    def _engine(self) -> Engine:
        if self._running is None:
            raise MisuseError(
                "there is no plan before the first call of the model, as protrain.wrap was given no example_batch: "
                "call the model itself, and not a method or part of it, on a training batch before this, or pass "
                "example_batch to protrain.wrap"
            )
        return self._running

    def parameter_names(self) -> list[str]:
        """The names of all managed parameters, in definition order."""
        return list(self._parameters)

    def export_parameter(self, name: str) -> dict[str, Tensor]:
        """All state of one parameter as CPU copies, so that a checkpoint never holds the whole model twice.

        A trainable parameter has ``master``, ``exp_avg`` and ``exp_avg_sq`` (fp32, in the parameter's shape) and
        ``step``. A frozen one has ``weight``. With several ranks all of them must call it.
        """
        self._engine.bindings.refuse_inside_full_parameters("export_parameter()")
        self.ranks.meet("export_parameter()")
        with self._engine.quiet():
            return parameter_state.export_parameter(self._by_name[name])

    def export_parts(self, names: Iterable[str]) -> Iterator[tuple[str, parameter_state.Part]]:
        """What this rank has of all state of the parameters ``names``, in place. Other ranks need not call it.

        Until it is read or copied, the model must not be trained.
        """
        self._engine.bindings.refuse_inside_full_parameters("a save of states")
        with self._engine.quiet():
            for name in names:
                yield name, parameter_state.export_part(self._by_name[name])

    def own_elements(self, name: str) -> slice:
        """The elements of a parameter whose state this rank has, in the order of a contiguous tensor."""
        return parameter_state.own_elements(self._by_name[name])

    def check_parameter(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Raise a ValueError if ``import_parameter`` could not set ``tensors``.

        Their shapes are enough to check.
        """
        parameter = self._parameters.get(name)
        if parameter is None:
            raise ValueError(f"the model has no parameter {name!r}: load a checkpoint of the same model")
        parameter_state.check_shapes(name, parameter.shape, tensors)
        if name not in self._trained and not {"weight", "master"} & set(tensors):
            raise ValueError(f"there is neither a weight nor a master of {name}: load a whole checkpoint")

    def import_parameter(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Set what ``export_parameter`` returned. A ValueError names a wrong name or shape.

        With several ranks all of them must call it, with the same tensors.
        """
        self.check_parameter(name, tensors)
        for kind, value in tensors.items():
            parameter_state.check_values(f"{kind} of {name}", value)
        self.ranks.meet("import_parameter()")
        self.import_parts([(name, slice(0, self._parameters[name].numel()), tensors)])

    def import_parts(self, parts: Iterable[tuple[str, slice, Mapping[str, Tensor]]]) -> None:
        """Set elements of parameters to tensors, as those of a ``Part``. ``parts`` has the names of the parameters too.

        With several ranks every one of them must be given at least once what it has of each parameter, though that be
        no elements, so that it learns of the step and drops the weights that it has gathered before.
        """
        self._engine.bindings.refuse_inside_full_parameters("a load of states")
        self._engine.refuse_write("a load of states")
        with self._engine.quiet():
            for name, elements, tensors in parts:
                member = self._by_name[name]
                parameter_state.import_part(member, elements, tensors)
                self._engine.weights_changed([member.chunk])
