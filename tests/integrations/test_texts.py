"""A plan holds for the row of the most tokens, which may be one of few characters, or come from a stream of TRL."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import on_ranks
from tests.integrations.text_runs import losses, losses_on_rank

pytest.importorskip("trl")


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_the_row_of_the_most_tokens_is_planned_for(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = losses(kind, tmp_path, on_protrain=True)
    assert not [one for one in caught if "nobody knows" in str(one.message)]
    assert ours == pytest.approx(losses(kind, tmp_path, on_protrain=False), rel=2e-5)


@pytest.mark.slow
def test_two_processes_plan_for_it(tmp_path: Path) -> None:
    found: list[list[list[float]]] = [
        on_ranks(2, losses_on_rank, "DPO", tmp_path, on_protrain, {}) for on_protrain in (True, False)
    ]
    assert found[0][0] == found[0][1]
    assert found[0][0] == pytest.approx(found[1][0], rel=2e-5)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_stream_is_planned_for_rows_as_long_as_the_trainer_leaves_them(kind: str, tmp_path: Path) -> None:
    """The first batch is short, and a later row is cut to ``max_length``."""
    limit: dict[str, Any] = {"max_length": 15 if kind == "DPO" else 8, "stream": True}
    ours = losses(kind, tmp_path, on_protrain=True, **limit)
    assert ours == pytest.approx(losses(kind, tmp_path, on_protrain=False, **limit), rel=2e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_texts_of_a_collator_are_warned_of_before_the_training(stream: bool, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="so the plan is made for the first batch, and a much longer batch") as caught:
        ours = losses("Trainer", tmp_path, on_protrain=True, max_steps=1, stream=stream)
    [warned] = [one for one in caught if "nobody knows" in str(one.message)]
    assert Path(warned.filename).name == "text_runs.py"
    assert ours == pytest.approx(losses("Trainer", tmp_path, on_protrain=False, max_steps=1, stream=stream), rel=2e-5)
