"""Several ranks read and write whole states together, with the values of one rank; one that is alone gets an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
import protrain.distributed.ranks
from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.pool import on_ranks
from tests.distributed.saves import FIRST, FOURTH, THIRD, Training
from tests.engine.harness import Spec, assert_same

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


def _flat(state: State) -> dict[str, torch.Tensor]:
    """All tensors of ``state`` by name."""
    weights, of_optimizer, full = state
    found = {f"model.{name}": value for name, value in weights.items()}
    found |= {f"full.{name}": value for name, value in full["full"].items()}
    for number, states in of_optimizer["state"].items():
        found |= {f"{number}.{kind}": torch.as_tensor(value) for kind, value in states.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2)])
def test_all_ranks_get_the_states_of_one_and_load_them(dtype: str, size: int) -> None:
    expected = train_and_read(0, 1, THIRD, dtype, range(2))
    final = train_and_read(0, 1, THIRD, dtype, range(4))
    assert float(expected[1]["state"][0]["exp_avg"].abs().sum()) > 0
    for state in on_ranks(size, train_and_read, size, FIRST, dtype, range(2)):
        assert_same(_flat(state), _flat(expected))
        assert state[1]["param_groups"] == expected[1]["param_groups"]
    for loaded, after in on_ranks(size, load_and_go_on, size, FOURTH, dtype, expected, range(2, 4)):
        assert_same(_flat(loaded), _flat(expected))
        assert_same(_flat(after), _flat(final))


@pytest.mark.slow
def test_edits_are_made_on_all_ranks_or_on_none() -> None:
    before: list[State] = on_ranks(3, train_and_read, 3, FIRST, "float32", range(0))
    name = "blocks.0.first.weight"
    expected = {**before[0][0], name: before[0][0][name] + 1.0}
    for edited, errors, after in on_ranks(3, edit, 3, FIRST):
        assert_same(edited, expected)
        assert_same(after, expected)
        assert [error.partition(",")[0] for error in errors] == [
            "MisuseError: rank 1 has edited enter.weight inside full_parameters otherwise than rank 0: make the same "
            "edits on every rank. No edit of this full_parameters is kept",
            "MisuseError: rank 1 has edited enter.bias inside full_parameters otherwise than rank 0: make the same "
            "edits on every rank. No edit of this full_parameters is kept",
            "ValueError: enter.bias was given the shape (3",
        ]
