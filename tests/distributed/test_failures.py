"""The error of one rank is what all of them name, also where the others wait in a collective of the model or script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.apart import Group
from tests.distributed.failures import in_profile, in_script

QUICK = {"TICK_S": 0.2, "CAUGHT_S": 1.0, "STUCK_S": 0.8}  # seconds, for tests of what is said rather than when
ERROR = "protrain.common.errors.MisuseError: "
FAILED = "ValueError: the profile of a rank fails"


def test_a_rank_fails_in_the_profile_while_the_others_are_in_a_collective_of_the_model(tmp_path: Path) -> None:
    """Gloo ends that as soon as the process of the rank has ended."""
    with Group(3, in_profile, "raises", {}, folder=tmp_path) as group:
        endings = group.endings(range(3), timeout_s=30)
    assert endings[1].errors == [FAILED]
    for rank in (0, 2):
        (error,) = endings[rank].errors
        assert error.startswith("RuntimeError: "), error
        said = endings[rank].text
        assert f"The ranks are out of step: rank 1 has raised an exception in protrain.wrap: {FAILED}" in said, said


def test_a_rank_without_memory_for_the_profile_of_a_model_with_collectives(tmp_path: Path) -> None:
    """It counts its profile, and waits for others that wait for it inside the model."""
    with Group(2, in_profile, "out of memory", QUICK, folder=tmp_path) as group:
        endings = group.endings(range(2), timeout_s=30)
    question = "the question whether a step was compiled"
    said = rf"rank 0 is in torch\.distributed\.all_reduce\(\), while rank 1 went on to {question}\. "
    (error,) = endings[1].errors
    assert re.match(ERROR + said, error), error
    assert re.search(f"^The ranks are out of step: {said}", endings[0].text, re.MULTILINE), endings[0].text


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ends", "rank 1 has ended, while rank 0 went on to state_dict(). All ranks must make the same calls"),
        ("loader", "rank 1 has raised an exception, while rank 0 went on to a forward: ValueError: the loader of a"),
        (
            "out of memory",
            "rank 1 came to a forward, while rank 0 came to a backward. ",
        ),
    ],
)
def test_what_a_rank_does_in_its_script_is_named(tmp_path: Path, what: str, said: str) -> None:
    with Group(2, in_script, what, QUICK, folder=tmp_path) as group:
        endings = group.endings(range(2), timeout_s=30)
    (error,) = endings[0].errors
    assert error.startswith(ERROR + said), error
