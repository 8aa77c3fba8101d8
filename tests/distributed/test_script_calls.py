"""A rank inside a collective of the script, for which the others would have to leave the model: all raise an error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.distributed.apart import Ending, Group
from tests.distributed.script_calls import legal, stuck

WITHIN_S = 10.0  # within which every rank raises
QUICK = {"TICK_S": 0.2, "STUCK_S": 0.8}  # seconds, for tests of what is said rather than when
ERROR = "protrain.common.errors.MisuseError: "


def _check(endings: dict[int, Ending], odd: int, call: str, at: str) -> None:
    """``endings`` are of ranks of which ``odd`` is in ``call``, while the others went on to ``at``."""
    said = rf"rank {odd} is in torch\.distributed\.{call}\(\), while rank \d went on to {at}\. All ranks must make the"
    for rank, ending in endings.items():
        assert ending.status == 1, ending.text
        (error,) = ending.errors
        if rank != odd:
            assert re.match(ERROR + said, error), error
        else:  # gloo ends the call when the other processes have ended, and Python prints the reason after its error
            assert error.startswith("RuntimeError: "), error
            assert re.search(rf"^The ranks are out of step: {said}", ending.text, re.MULTILINE), ending.text


def test_barrier_while_the_others_are_in_forward(tmp_path: Path) -> None:
    """With the times of the product."""
    with Group(3, stuck, 1, "barrier", "forward", {}, folder=tmp_path) as group:
        group.wait_for("calls", rank=1)
        endings = group.endings(range(3), timeout_s=WITHIN_S)
    _check(endings, 1, "barrier", "a forward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "odd", "call", "where", "at"),
    [
        (2, 1, "barrier", "backward", "a backward"),
        (3, 2, "all_reduce", "backward", "a backward"),
        (3, 0, "all_reduce", "state_dict", r"state_dict\(\)"),
    ],
)
def test_a_call_for_which_others_do_not_come(
    tmp_path: Path, size: int, odd: int, call: str, where: str, at: str
) -> None:
    with Group(size, stuck, odd, call, where, QUICK, folder=tmp_path) as group:
        endings = group.endings(range(size), timeout_s=30)
    _check(endings, odd, call, at)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "values"), [("pair", [1, 1, 1]), ("async", [3, 3, 3])])
def test_a_call_that_ends_by_itself(tmp_path: Path, what: str, values: list[int]) -> None:
    """Its group is without the rank that waits in the model, or that rank has begun the call before."""
    with Group(3, legal, what, QUICK, folder=tmp_path) as group:
        endings = group.endings(range(3), timeout_s=30)
    for (rank, ending), value in zip(endings.items(), values, strict=True):
        assert ending.status == 0, (rank, ending.text)
        assert f"trained, with {value}\n" in ending.text


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_barrier_of_nccl(tmp_path: Path) -> None:
    with Group(2, stuck, 1, "barrier", "backward", {}, "cuda", folder=tmp_path) as group:
        group.wait_for("calls", rank=1)
        endings = group.endings(range(2), timeout_s=3 * WITHIN_S)
    assert endings[1].status != 0, endings[1].text
    (error,) = endings[0].errors
    assert error.startswith(f"{ERROR}rank 1 is in torch.distributed.barrier(), while rank 0 went on to "), error
