"""Whatever parts the ranks of a training raises an error on all of them that says what, and leaves no process."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from protrain.distributed.links import first_difference
from tests.distributed.apart import Group
from tests.distributed.out_of_step import do, end, run, run_with_child

pytest.importorskip("transformers")

WITHIN_S = 10.0  # within which every rank raises
QUICK = {"TICK_S": 0.3, "CAUGHT_S": 4.0}  # seconds, for tests of what is said rather than when
ERROR = "protrain.common.errors.MisuseError: "


@pytest.mark.parametrize(
    ("size", "odd", "what", "own", "others"),
    [
        (2, 1, "forward", "ValueError: the forward of a rank fails", "rank 1 has raised an exception in a forward, "),
        (3, 0, "backward", "ValueError: the backward of a rank fails", "rank 0 has raised an exception in a backward"),
        (2, 0, "loader", "ValueError: the loader of a rank fails", "rank 0 has raised an exception, while rank 1 went"),
        (3, 2, "end", "", "rank 2 has ended, while rank "),
    ],
)
def test_one_rank_raises_or_ends(tmp_path: Path, size: int, odd: int, what: str, own: str, others: str) -> None:
    with Group(size, do, odd, what, QUICK, 8, folder=tmp_path, frees_modules=size == 3) as group:
        endings = group.endings(range(size), timeout_s=30)
    mine = endings.pop(odd)
    assert mine.errors == ([own] if own else []), mine.text
    assert mine.status == (1 if own else 0)
    for ending in endings.values():
        assert ending.status == 1
        (error,) = ending.errors  # one, without another that it followed from
        assert error.startswith(ERROR + others), error
        assert error.endswith(own), error


def test_an_end_is_judged_as_soon_as_it_is_told(tmp_path: Path) -> None:
    """A launcher ends the others as soon as the process is gone that an error has ended, which takes a second."""
    with Group(2, do, 1, "late end", {"TICK_S": 100.0}, 8, folder=tmp_path) as group:
        (ending,) = group.endings([0], timeout_s=30).values()
    assert ending.errors[0].startswith(ERROR + "rank 1 has ended, while rank 0 went on to "), ending.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "odd", "what", "said"),
    [
        (3, 1, "another forward", "rank 1 came to a forward, while ranks 0, 2 came to a backward. "),
        (3, 0, "state_dict", "rank 0 came to state_dict(), while ranks 1, 2 came to a forward"),
        (2, 1, "optimizer state_dict", "rank 1 came to the optimizer's state_dict(), while rank 0 came to a forward"),
        (2, 0, "full_parameters", "rank 1 came to a forward, while rank 0 came to full_parameters()"),
    ],
)
def test_one_rank_makes_another_call(tmp_path: Path, size: int, odd: int, what: str, said: str) -> None:
    with Group(size, do, odd, what, QUICK, 8, folder=tmp_path) as group:
        endings = group.endings(range(size), timeout_s=30)
    for ending in endings.values():
        assert ending.status == 1
        (error,) = ending.errors
        assert error.startswith(ERROR + said), error


@pytest.mark.slow
@pytest.mark.parametrize(("size", "what"), [(3, "shape"), (2, "caught")])
def test_what_parts_nobody(tmp_path: Path, size: int, what: str) -> None:
    with Group(size, do, 1, what, QUICK, 8, folder=tmp_path) as group:
        for ending in group.endings(range(size), timeout_s=30).values():
            assert ending.status == 0, ending.text
            assert "\ntrained\n" in ending.text


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_with_a_warning(tmp_path: Path) -> None:
    with Group(3, do, 1, "slow", {"TICK_S": 0.2, "WARN_S": 1.5}, 4, folder=tmp_path) as group:
        endings = group.endings(range(3), timeout_s=30)
    for rank, ending in endings.items():
        assert ending.status == 0, ending.text
        found = re.findall(r"UserWarning: rank (\d) has waited \d+ s for (.*) \(collective (\d+)\)", ending.text)
        waits = [wait for _, _, wait in found]
        assert len(set(waits)) == len(waits), found  # one warning for each wait
        if rank == 1:
            stack = ending.text.split("Other ranks wait for rank 1, which is here:")[1]
            assert re.search(r"out_of_step\.py\", line \d+ in _misbehave", stack), stack
        else:
            assert (str(rank), "rank 1 in the gather of chunk 0") in [(who, what) for who, what, _ in found]


def test_a_killed_rank_has_children_of_its_own(tmp_path: Path) -> None:
    """They keep its connections of gloo open, so that no collective fails."""
    with Group(2, run_with_child, folder=tmp_path) as group:
        for rank in range(2):
            group.wait_for("child ", rank=rank)
        children = [int(group.text(rank).split("child ")[1].split()[0]) for rank in range(2)]
        try:
            group.send(1, signal.SIGKILL)
            (ending,) = group.endings([0], timeout_s=WITHIN_S).values()
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
        assert ending.errors[0].startswith(f"{ERROR}rank 1 has died")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("odd", "what", "said"),
    [
        (1, "forward", "rank 1 has raised an exception in a forward, while rank 0 went on to "),
        (0, "backward", "rank 0 has raised an exception in a backward, while rank 1 went on to "),
        (1, "another forward", "rank 1 came to a forward, while rank 0 came to a backward. "),
        (0, "state_dict", "rank 1 came to a forward, while rank 0 came to state_dict(). "),
    ],
)
def test_out_of_step_on_two_gpus(tmp_path: Path, odd: int, what: str, said: str) -> None:
    with Group(2, do, odd, what, QUICK, 8, "cuda", folder=tmp_path) as group:
        endings = group.endings(range(2), timeout_s=60)
    ending = endings[1 - odd]
    assert len(ending.errors) == 1, ending.text
    assert ending.errors[0].startswith(ERROR + said), ending.text


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("victim", range(2))
def test_a_rank_is_killed_on_two_gpus(tmp_path: Path, victim: int) -> None:
    with Group(2, run, 600.0, "cuda", folder=tmp_path) as group:
        group.wait_for("step 2", rank=victim)
        group.send(victim, signal.SIGKILL)
        (ending,) = group.endings([1 - victim], timeout_s=WITHIN_S).values()
        assert any(each.startswith(f"{ERROR}rank {victim} has died") for each in ending.errors), ending.text


def test_first_difference() -> None:
    usual = [(5, "a forward", 0), (6, "the gather of chunk 1", 256)]
    earlier = [(4, "a backward", 0), (5, "a forward", 0)]
    assert first_difference({0: usual, 1: usual, 2: earlier}) is None
    assert first_difference({0: usual, 1: []}) is None
    said = first_difference({0: [(6, "the gather of chunk 1", 512)], 1: usual, 2: usual})
    assert said is not None
    assert said.startswith(
        "rank 0 came to the gather of chunk 1 with 512 bytes, while ranks 1, 2 came to the gather of chunk 1 with 256 "
        "bytes. All ranks must make the same calls"
    )
    other = [(6, "a backward", 0), (7, "the gather of chunk 1", 256)]
    said = first_difference({0: other, 1: usual, 2: other, 3: [*usual, (7, "a forward", 0)]})
    assert said is not None
    assert said.startswith(
        "ranks 1, 3 came to the gather of chunk 1 with 256 bytes, while ranks 0, 2 came to a backward"
    )


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_wrap_ends_a_group_that_it_has_started(tmp_path: Path, own: bool) -> None:
    with Group(2, end, own, folder=tmp_path, frees_modules=True) as group:
        for ending in group.endings(range(2), timeout_s=120).values():
            assert ending.status == 0, ending.text
            assert f"trained\nthere is a group: {own}\n" in ending.text, ending.text
