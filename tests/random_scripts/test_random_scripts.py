"""Random scripts have the plain loop's bits under a plan, on one process and on several."""

from __future__ import annotations

import pytest
import torch

from tests.engine.harness import FEW_PLANS, PLANS, Spec
from tests.random_scripts import steps
from tests.random_scripts.compare import DiffersError, case_of, compare
from tests.random_scripts.draw import Action
from tests.random_scripts.models import DEPTH
from tests.random_scripts.sides import Case

_LOSS = {"kind": "usual", "seed": 0, "size": 8, "block": 0}


def run(seed: int, ranks: int = 1) -> None:
    case, script = case_of(seed, ranks)
    try:
        compare(case, script)
    except DiffersError as error:
        pytest.fail(f"python -m tests.random_scripts {seed} {seed + 1} --ranks {ranks}\n{case}: {error}")


@pytest.mark.parametrize("seed", range(6))
def test_some_scripts(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 66, 10))
def test_more_scripts(seed: int) -> None:
    for each in range(seed, seed + 10):
        run(each)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (10, 3)])
def test_scripts_on_ranks(seed: int, ranks: int) -> None:
    for each in range(seed, seed + 10):
        run(each, ranks)


@pytest.mark.parametrize(("spec", "ranks"), [(PLANS[0], 1), (PLANS[9], 1), (PLANS[9], 2)], ids=str)
def test_a_backward_whose_gradients_are_all_dropped_counts_for_nothing(spec: Spec, ranks: int) -> None:
    dropped: list[Action] = [("drop_gradient", {"index": index}) for index in range(4 + 6 * DEPTH)]
    script: list[Action] = [(steps.backward, _LOSS), ("clip_by_torch", {"max_norm": 0.1}), *dropped]
    script += [(steps.backward, {**_LOSS, "seed": 1}), (steps.step_and_zero, {})]
    assert compare(Case("residual", torch.bfloat16, spec, inside=False, ranks=ranks), script) == []


@pytest.mark.parametrize(
    ("dtype", "spec"), zip((torch.float32, torch.bfloat16, torch.float16), FEW_PLANS[:3], strict=True), ids=str
)
def test_every_edit_outside_of_full_parameters_is_refused_and_changes_nothing(dtype: torch.dtype, spec: Spec) -> None:
    """Before a step, before backward, and before the update."""
    ways = "in place", "data", "replaced", "foreach", "init", "rows", "out"
    edits: list[Action] = [("edit_outside", {"index": 5, "how": how}) for how in ways]
    script: list[Action] = [*edits, (steps.forward_for_later, _LOSS), *edits]
    script += [(steps.backward_of_pending, {"last": True, "retained": False}), *edits, (steps.step_and_zero, {})]
    assert compare(Case("residual", dtype, spec, inside=False), [*script, *edits]) == []


@pytest.mark.parametrize(
    "script",
    [
        [(steps.backward_no_sync, _LOSS), (steps.backward, _LOSS)],
        [(steps.backward, {**_LOSS, "kind": "part"}), (steps.backward, {**_LOSS, "kind": "only weights"})],
    ],
    ids=["the visits that were left updated nothing", "a weight is not read as if a unit still used it"],
)
def test_after_a_backward_that_ranks_have_refused(script: list[Action]) -> None:
    case = Case("tied", torch.float32, PLANS[0], inside=True, ranks=2)
    refused = compare(case, script)
    assert refused[0].startswith("0 ")


@pytest.mark.parametrize("then", [(steps.step, {}), (steps.clip, {"max_norm": 0.1}), (steps.backward, _LOSS)])
def test_all_gradients_are_multiplied_or_none(then: Action) -> None:
    script: list[Action] = [
        (steps.backward, _LOSS),
        ("scale_gradient", {"index": 5}),
        then,
        (steps.backward, _LOSS),
        (steps.step, {}),
    ]
    (refused,) = compare(Case("residual", torch.float32, FEW_PLANS[1], inside=False, accumulation=2), script)
    assert refused.startswith("2 ")
