"""Collectives of the script beside those of the training: one that the others never reach is named."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from protrain.distributed import watch
from tests.distributed.apart import Ending, Group
from tests.distributed.out_of_step import batch, step, wrapped


def stuck(rank: int, size: int, odd: int, call: str, where: str, times: dict[str, float], device: str = "cpu") -> None:
    """Train. Rank ``odd`` makes ``call`` where the others do not, which wait for it in ``where``."""
    model = _after_a_step(rank, times, device)
    value = batch(rank, 1)
    if where == "forward" and rank == odd:
        _call(call, device)
    loss = model(value)
    if where == "backward" and rank == odd:
        _call(call, device)
    loss.backward()
    if where == "state_dict":
        if rank == odd:
            _call(call, device)
        model.state_dict()


def legal(rank: int, size: int, what: str, times: dict[str, float]) -> None:
    """Train on three ranks. Before the second step rank 1 waits in a collective for rank 2, which is slow."""
    model = _after_a_step(rank, times)
    pair = dist.new_group([1, 2])
    values, work = torch.ones(1), None
    if rank == 2:
        time.sleep(2.5)
    if what == "pair":
        if rank != 0:
            dist.barrier(group=pair)
    else:
        assert what == "async"
        work = dist.all_reduce(values, async_op=rank == 0)
    model(batch(rank, 1)).backward()
    if work is not None:
        work.wait()
    print(f"trained, with {values.item():.0f}", flush=True)


def _after_a_step(rank: int, times: dict[str, float], device: str = "cpu") -> nn.Module:
    """A model that was trained for a step. ``times`` changes those of the watcher, in seconds."""
    for name, seconds in times.items():
        assert hasattr(watch, name)
        setattr(watch, name, seconds)
    model, optimizer = wrapped(rank, device)
    step(model, optimizer, batch(rank, 0))
    return model


def _call(call: str, device: str) -> None:
    print("calls", flush=True)
    if call == "barrier":
        dist.barrier()
    else:
        assert call == "all_reduce"
        dist.all_reduce(torch.ones(1, device=device))


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
