"""What ranks do to read and write whole states together, and what one of them does alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import protrain
import protrain.distributed.ranks
from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.saves import Training
from tests.engine.harness import Spec

State = tuple[dict[str, Tensor], dict[str, Any], dict[str, dict[str, Tensor]]]


def whole_states(model: nn.Module, optimizer: ProTrainOptimizer) -> State:
    """The state of the model, that of the optimizer, and the weights inside full_parameters."""
    with protrain.full_parameters(model):
        full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return dict(model.state_dict()), optimizer.state_dict(), {"full": full}


def train_and_read(rank: int, size: int, spec: Spec, dtype: str, steps: range) -> State:
    """The states after ``steps``."""
    training = Training(rank, size, spec, dtype=dtype)
    training.train(steps)
    return whole_states(training.model, training.optimizer)


def load_and_go_on(rank: int, size: int, spec: Spec, dtype: str, state: State, steps: range) -> tuple[State, State]:
    """The states after loading ``state`` into a training that has gone astray, and after ``steps`` more."""
    training = Training(rank, size, spec, dtype=dtype)
    training.train(range(1))
    training.model.load_state_dict(state[0])
    training.optimizer.load_state_dict(state[1])
    loaded = whole_states(training.model, training.optimizer)
    training.train(steps)
    return loaded, whole_states(training.model, training.optimizer)


def edit(rank: int, size: int, spec: Spec) -> tuple[dict[str, Tensor], list[str], dict[str, Tensor]]:
    """Edit a weight on all ranks, then in ways that are refused.

    Returns:
        The weights after the edit, the errors, and the weights after them.
    """
    training = Training(rank, size, spec)
    model = training.model
    with protrain.full_parameters(model), torch.no_grad():
        model.get_parameter("blocks.0.first.weight").add_(1.0)
    edited, errors = dict(model.state_dict()), []
    for otherwise in (_on_one_rank, _another_value, _another_shape):
        try:
            with protrain.full_parameters(model), torch.no_grad():
                otherwise(rank, model)
        except (RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return edited, errors, dict(model.state_dict())


def _on_one_rank(rank: int, model: nn.Module) -> None:
    if rank == 0:
        model.get_parameter("enter.weight").zero_()


def _another_value(rank: int, model: nn.Module) -> None:
    model.get_parameter("enter.bias").fill_(float(rank))


def _another_shape(rank: int, model: nn.Module) -> None:
    if rank == 1:
        model.get_parameter("enter.bias").data = torch.zeros(3)


def call_alone(rank: int, size: int, spec: Spec, folder: str) -> list[str]:
    """One rank calls what all must call. Returns the errors, of which the rank has one for each of its calls."""
    protrain.distributed.ranks._ABSENT_S = 0.3
    name = "blocks.0.first.weight"
    state = torch.zeros(37, 37)
    calls: list[Callable[[Training], Any]] = [
        lambda training: training.model.state_dict(),
        lambda training: training.model.get_submodule("blocks.1").state_dict(),
        lambda training: training.model.load_state_dict({name: state}, strict=False),
        lambda training: training.optimizer.state_dict(),
        lambda training: training.optimizer.load_state_dict({}),
        lambda training: training.optimizer.export_parameter(name),
        lambda training: protrain.full_parameters(training.model).__enter__(),
        lambda training: training.save(folder),
        lambda training: training.load(folder),
        lambda training: protrain.async_save(folder, training.model, training.optimizer),
        lambda training: protrain.export(training.model, folder),
        lambda training: protrain.full_state_dict(training.model),
        lambda training: training.optimizer.full_state_dict(),
    ]
    errors = []
    for at, call in enumerate(calls):
        # What has failed in one group must not disturb the next.
        training = Training(rank, size, spec, process_group=dist.new_group(backend="gloo"))
        if rank == at % size:
            try:
                call(training)
            except protrain.MisuseError as error:
                errors.append(str(error))
        dist.barrier()
    protrain.distributed.ranks._ABSENT_S = 20.0
    return errors
