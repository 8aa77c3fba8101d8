"""Whatever parts the ranks of a training raises an error on all of them that says what, and leaves no process."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from protrain.distributed.links import first_difference
from tests.distributed.apart import Group
from tests.distributed.out_of_step import (
    QUICK,
    attempt,
    batch,
    do,
    end,
    end_group_after_an_error,
    quick,
    run,
    run_with_child,
    step,
    wrapped,
)
from tests.distributed.pool import on_ranks

ERROR = "protrain.common.errors.MisuseError: "

# What one rank does before a step that the others do not, and the error of all ranks.
APART = {
    "another forward": r"rank 1 came to a forward, while OTHERS came to a backward\. All ranks must make the",
    "evaluation": r"rank 1 came to a forward under torch\.no_grad\(\), while OTHERS came to a forward\. ",
    "state_dict": r"rank 1 came to state_dict\(\), while OTHERS came to a forward",
    "optimizer state_dict": r"rank 1 came to the optimizer's state_dict\(\), while OTHERS came to a forward",
    "full_parameters": r"rank 1 came to full_parameters\(\), while OTHERS came to a forward",
    "hyperparameters": r"rank 1 has other hyperparameters than rank 0 \(lr of group 0 is 0\.05, not 0\.01; beta1 of ",
    "barrier": r"rank 1 is in torch\.distributed\.barrier\(\), while OTHERS went on to a forward\. All ranks must",
    "all_reduce": r"rank 1 is in torch\.distributed\.all_reduce\(\), while OTHERS went on to a forward\. All",
    "shape": "",
    "caught": "",  # an error
}


@pytest.mark.parametrize(("size", "what"), [*((2, what) for what in APART), (3, "another forward")])
def test_one_rank_does_something_else(size: int, what: str) -> None:
    others = "rank(s 0, 2| 0| 2)" if size == 3 else "rank 0"  # one of which may come late
    for said in on_ranks(size, attempt, size, 1, what):
        if APART[what]:
            assert re.match("MisuseError: " + APART[what].replace("OTHERS", others), said), said
        else:
            assert said == ""


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_one_rank_raises_an_error_and_catches_it(what: str) -> None:
    other, own = on_ranks(2, attempt, 2, 1, what)
    assert own == f"ValueError: the {what} of a rank fails"
    assert other.startswith(f"MisuseError: rank 1 has raised an exception in a {what}, while rank 0 went on to ")
    # The error of a backward is told to the script alone by autograd.
    assert other.endswith("See what that rank printed" if what == "backward" else own)


def legal(rank: int, what: str) -> float:
    """Before the second step rank 1 waits in a collective for rank 2, which is slow. Returns what that gives."""
    with quick():
        model, optimizer = wrapped(rank, "cpu")
        step(model, optimizer, batch(rank, 0))
        pair, values, work = dist.new_group([1, 2]), torch.ones(1), None
        if rank == 2:
            time.sleep(2.0)
        if what == "of a pair" and rank != 0:
            dist.barrier(group=pair)
        elif what == "begun before":
            work = dist.all_reduce(values, async_op=rank == 0)
        model(batch(rank, 1)).backward()
        if work is not None:
            work.wait()
    return values.item()


@pytest.mark.slow
@pytest.mark.parametrize(("what", "value"), [("of a pair", 1.0), ("begun before", 3.0)])
def test_a_call_of_the_script_that_ends_by_itself(what: str, value: float) -> None:
    """Its group is without the rank that waits in the model, or that rank has begun the call before."""
    assert on_ranks(3, legal, what) == [value] * 3


# -- processes that end ------------------------------------------------------------------------------------------------


def test_a_rank_that_its_script_ends_by_an_error(tmp_path: Path) -> None:
    with Group(2, do, 0, "loader", QUICK, 8, folder=tmp_path) as group:
        endings = group.endings(range(2))
    own = "ValueError: the loader of a rank fails"
    assert endings[0].errors == [own], endings[0].text
    (error,) = endings[1].errors  # one, without another that it followed from
    assert error.startswith(f"{ERROR}rank 0 has raised an exception, while rank 1 went on to "), error
    assert error.endswith(own), error
    assert [ending.status for ending in endings.values()] == [1, 1]


def test_an_error_that_a_script_has_not_left_yet_is_named(tmp_path: Path) -> None:
    with Group(2, end_group_after_an_error, QUICK, folder=tmp_path) as group:
        endings = group.endings(range(2))
    (error,) = endings[0].errors
    said = "rank 1 has raised an exception, while rank 0 went on to a forward: ValueError: the loader of a rank fails"
    assert error == ERROR + said, error


def test_an_end_is_judged_as_soon_as_it_is_told(tmp_path: Path) -> None:
    """A launcher ends the others as soon as the process is gone that an error has ended, which takes a second."""
    with Group(2, do, 1, "late end", {"TICK_S": 1000.0}, 8, folder=tmp_path, frees_modules=True) as group:
        endings = group.endings(range(2))
    assert [ending.status for ending in endings.values()] == [1, 0]
    assert endings[0].errors[0].startswith(ERROR + "rank 1 has ended, while rank 0 went on to "), endings[0].text


def test_a_killed_rank_has_children_of_its_own(tmp_path: Path) -> None:
    """They keep its connections of gloo open, so that no collective fails."""
    with Group(2, run_with_child, folder=tmp_path) as group:
        for rank in range(2):
            group.wait_for("child ", rank=rank)
        children = [int(group.text(rank).split("child ")[1].split()[0]) for rank in range(2)]
        try:
            group.send(1, signal.SIGKILL)
            (ending,) = group.endings([0]).values()
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
        assert ending.errors[0].startswith(f"{ERROR}rank 1 has died")


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_with_a_warning(tmp_path: Path) -> None:
    with Group(3, do, 1, "slow", {"TICK_S": 0.2, "WARN_S": 1.5}, 4, folder=tmp_path) as group:
        endings = group.endings(range(3))
    for rank, ending in endings.items():
        assert ending.status == 0, ending.text
        found = re.findall(r"UserWarning: rank (\d) has waited \d+ s for (.*) \(collective (\d+)\)", ending.text)
        waits = [wait for _, _, wait in found]
        assert len(set(waits)) == len(waits), found  # one warning for each wait
        if rank == 1:
            _, *stacks = ending.text.split("Other ranks wait for rank 1, which is here:")  # at its start, too
            assert any(re.search(r"out_of_step\.py\", line \d+ in _misbehave", stack) for stack in stacks), stacks
        else:
            assert (str(rank), "rank 1 in the gather of chunk 0") in [(who, what) for who, what, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_wrap_ends_a_group_that_it_has_started(tmp_path: Path, own: bool) -> None:
    with Group(2, end, own, folder=tmp_path, frees_modules=True) as group:
        for ending in group.endings(range(2)).values():
            assert ending.status == 0, ending.text
            assert f"trained\nthere is a group: {own}\n" in ending.text, ending.text


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("forward", "rank 1 has raised an exception in a forward, while rank 0 went on to "),
        ("backward", "rank 1 has raised an exception in a backward, while rank 0 went on to "),
        ("another forward", "rank 1 came to a forward, while rank 0 came to a backward. "),
        ("state_dict", "rank 1 came to state_dict(), while rank 0 came to a forward"),
        ("barrier", "rank 1 is in torch.distributed.barrier(), while rank 0 went on to "),
    ],
)
def test_out_of_step_on_two_gpus(tmp_path: Path, what: str, said: str) -> None:
    with Group(2, do, 1, what, QUICK, 8, "cuda", folder=tmp_path) as group:
        ending = group.endings(range(2))[0]
    assert len(ending.errors) == 1, ending.text
    assert ending.errors[0].startswith(ERROR + said), ending.text


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("victim", range(2))
def test_a_rank_is_killed_on_two_gpus(tmp_path: Path, victim: int) -> None:
    with Group(2, run, 600.0, "cuda", folder=tmp_path) as group:
        group.wait_for("step 2", rank=victim)
        group.send(victim, signal.SIGKILL)
        (ending,) = group.endings([1 - victim]).values()
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
