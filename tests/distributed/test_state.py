"""Several ranks read and write whole states together, with the values of one rank; one that is alone gets an error."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import on_ranks
from tests.distributed.saves import FIRST, FOURTH, THIRD
from tests.distributed.whole_states import State, call_alone, edit, load_and_go_on, train_and_read
from tests.engine.harness import assert_same


def _flat(state: State) -> dict[str, torch.Tensor]:
    """All tensors of ``state`` by name."""
    weights, of_optimizer, full = state
    found = {f"model.{name}": value for name, value in weights.items()}
    found |= {f"full.{name}": value for name, value in full["full"].items()}
    for number, states in of_optimizer["state"].items():
        found |= {f"{number}.{kind}": torch.as_tensor(value) for kind, value in states.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 4), ("float32", 2)])
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


@pytest.mark.slow
def test_a_call_on_one_rank_alone_is_an_error_within_seconds(tmp_path: Path) -> None:
    errors = on_ranks(2, call_alone, 2, FIRST, str(tmp_path), timeout_s=240)
    found = [
        re.search(r" and gives up. Call (.*) in every process", error)
        for both in zip_longest(*errors)  # the ranks take turns
        for error in both
        if error is not None
    ]
    names = [match and match.group(1) for match in found]
    assert names == [
        "state_dict()",
        "state_dict()",
        "load_state_dict()",
        "the optimizer's state_dict()",
        "the optimizer's load_state_dict()",
        "export_parameter()",
        "full_parameters()",
        "save_checkpoint()",
        "load_checkpoint()",
        "async_save()",
        "protrain.export()",
        "full_state_dict()",
        "the optimizer's full_state_dict()",
    ]
    assert not list(tmp_path.iterdir())
