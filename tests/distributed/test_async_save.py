"""A save beside the training has the state of the moment at which it was asked for, or is not there."""

from __future__ import annotations

import os
import resource
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import protrain
import protrain.checkpoint.saving as saving
from protrain.checkpoint.manifest import list_saves
from protrain.common.tables import format_bytes
from tests.distributed.apart import LIMIT_S
from tests.distributed.pool import error_of, on_ranks
from tests.distributed.training import FIRST, SECOND, THIRD, Run, Training, go_on
from tests.engine.harness import assert_same


@contextmanager
def held(*, by: bool = True) -> Iterator[threading.Event]:
    """A context in which writes of parameters wait for the event, if ``by`` is true."""
    go_on, write = threading.Event(), saving.write_parameters

    def wait_and_write(*args: Any) -> Any:
        if by:
            assert go_on.wait(LIMIT_S)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_parameters", wait_and_write)
        yield go_on


def save_and_train(rank: int, size: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int, str]:
    """Save while two steps are trained, with a last rank that writes after them.

    Returns:
        The states at the time of the save and in the end, the number of saves before the last rank writes, and the path
        of the save.
    """
    training = Training(rank, size, FIRST)
    training.train(range(2))
    saved = training.states()
    with held(by=rank == size - 1) as go_on:
        path = training.save_beside(folder)
        training.train(range(2, 4))
        early = len(list_saves(folder))
        dist.barrier()
        go_on.set()
        return saved, training.states(), early, str(path.result())


def save_twice(rank: int, size: int, folder: str) -> list[str]:
    """Save in the background and, while that is being written, again; and load. Returns the names of the saves."""
    training = Training(rank, size, None)  # the harness would leave no memory for a copy on one rank
    training.train(range(1))
    with held() as go_on:
        training.save_beside(folder, extra="first")
        training.train(range(1, 2))
        threading.Timer(0.2, go_on.set).start()
        training.save(folder, extra="second")
    with held() as go_on:
        training.train(range(2, 3))
        training.save_beside(folder, extra="third")
        threading.Timer(0.2, go_on.set).start()
        assert training.load(folder) == "third"
    return [save.name for save in list_saves(folder)]


def fail_to_save(rank: int, size: int, beside: bool, folder: str) -> tuple[str, set[tuple[str, str]], list[str]]:
    """Save, ``beside`` the training or not, with a disk that is full for the last rank, and once more with room.

    Returns:
        The error, the warnings with the files that they name, and what there was after the error.
    """
    training = Training(rank, size, FIRST)
    training.save(folder)
    training.train(range(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with warnings.catch_warnings(record=True, action="always") as warned:
        if rank == size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        error = error_of(lambda: training.save_beside(folder).result() if beside else training.save(folder))
        saving.wait_for_async_saves(training.optimizer, Path(folder))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()  # the first rank has removed what there was of the save
    found = sorted(os.listdir(folder))
    dist.barrier()
    training.save(folder)
    return error, {(str(each.message), each.filename) for each in warned}, found


@pytest.mark.slow
def test_training_goes_on_and_does_not_change_what_is_saved(tmp_path: Path) -> None:
    found = on_ranks(3, save_and_train, 3, str(tmp_path))
    (save,) = list_saves(tmp_path)
    saved, final = found[0][:2]
    assert not torch.equal(saved["exp_avg.blocks.1.first.weight"], final["exp_avg.blocks.1.first.weight"])
    assert [rest for _, _, *rest in found] == [[0, str(save)]] * 3, "it is there when the last rank has written"
    # Three ranks have three micro-batches, and so has one that goes on.
    for loaded, trained in on_ranks(3, go_on, 3, Run(SECOND, load=str(tmp_path), after=range(2, 4))):
        assert_same(loaded, saved)
        assert_same(trained, final)
    assert_same(go_on(0, 1, Run(THIRD, load=str(tmp_path)))[0], saved)


@pytest.mark.slow
def test_another_save_and_a_load_wait_for_it(tmp_path: Path) -> None:
    names = on_ranks(2, save_twice, 2, str(tmp_path))
    assert names == [["00002-step-2", "00003-step-3"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_of_one_rank_is_an_error_on_all_and_leaves_the_earlier_save(tmp_path: Path, beside: bool) -> None:
    for text, warned, names in on_ranks(3, fail_to_save, 3, beside, str(tmp_path)):
        assert text.startswith("OSError: cannot write")
        assert "state-00002-00001.safetensors" in text
        of_saves = {file for said, file in warned if said.startswith("an async_save has failed: OSError: cannot write")}
        assert of_saves == ({getfile(Training)} if beside else set()), "that which has called async_save"
        assert names == ["00001-step-0"]
    assert [save.name for save in list_saves(tmp_path)] == ["00001-step-0", "00002-step-1"]


def test_it_is_refused_where_the_plan_leaves_no_memory_for_a_copy(tmp_path: Path) -> None:
    training = Training(0, 1, SECOND)  # its four micro-batches a step make the harness give no more than the plan takes
    sizes = {name: p.numel() * (12 if p.requires_grad else 4) for name, p in training.model.named_parameters()}
    with pytest.raises(protrain.BudgetError) as raised:
        protrain.async_save(tmp_path, training.model, training.optimizer)
    assert f"needs {format_bytes(sum(sizes.values()))} of host memory for a copy" in str(raised.value)
    assert "the plan leaves 0 " in str(raised.value)
    assert not list(tmp_path.iterdir())
