"""What ranks do to save beside their training, with threads that write when the test lets them."""

from __future__ import annotations

import os
import resource
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import protrain
import protrain.checkpoint.saving as saving
from protrain.checkpoint.manifest import list_saves
from tests.distributed.saves import FIRST, Training


@contextmanager
def held(*, by: bool = True) -> Iterator[threading.Event]:
    """A context in which writes of parameters wait for the event, if ``by`` is true."""
    go_on, write = threading.Event(), saving.write_parameters

    def wait_and_write(*args: Any) -> Any:
        if by:
            assert go_on.wait(60)
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
        path = protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler)
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
        protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler, extra="first")
        training.train(range(1, 2))
        threading.Timer(0.2, go_on.set).start()
        training.save(folder, extra="second")
    with held() as go_on:
        training.train(range(2, 3))
        protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler, extra="third")
        threading.Timer(0.2, go_on.set).start()
        assert training.load(folder) == "third"
    return [save.name for save in list_saves(folder)]


def fail_to_save(rank: int, size: int, folder: str) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Save with a disk that is full for the last rank. Returns the error, each warning and its file, and the saves."""
    training = Training(rank, size, FIRST)
    training.save(folder)
    training.train(range(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    text = ""
    with warnings.catch_warnings(record=True, action="always") as warned, held() as go_on:
        path = protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler)
        if rank == size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        go_on.set()
        try:
            path.result()
        except OSError as error:
            text = str(error)
        finally:
            saving.wait_for_async_saves(training.optimizer, Path(folder))
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()  # the first rank has removed what there was of the save
    return text, [(str(each.message), each.filename) for each in warned], sorted(os.listdir(folder))


def save_without_a_store(rank: int, size: int, folder: str) -> tuple[str, list[str]]:
    """Save while the last rank cannot connect to the store, and again. Returns the error and the saves."""
    training = Training(rank, size, None)  # the harness would leave no memory for a copy on one rank
    training.train(range(1))
    with pytest.MonkeyPatch.context() as patch:
        if rank == size - 1:
            patch.setattr(type(dist.distributed_c10d._get_default_store()), "clone", _refuse)
        with pytest.raises(dist.DistError) as raised:
            protrain.async_save(folder, training.model, training.optimizer)
    training.save(folder)
    return str(raised.value), sorted(os.listdir(folder))


def _refuse(_: dist.Store) -> None:
    raise dist.DistNetworkError("the store is gone")


def save_and_wait_to_be_killed(rank: int, size: int, folder: str) -> None:
    """Save, and begin another save, of which the last rank never writes its part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(rank, size, FIRST)
    training.train(range(1))
    training.save(folder)
    torch.save(training.states(), Path(folder, f"states{rank}"))
    training.train(range(1, 2))
    with held(by=rank == size - 1):
        path = protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler)
        Path(folder, f"rank{rank}").touch()
        path.result()


def save_and_end_the_group(rank: int, size: int, folder: str) -> None:
    """Save, and end the process group before the save is written, as scripts do at their end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(rank, size, None)  # the harness would leave no memory for a copy
    training.train(range(1))
    with held() as go_on:
        protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler)
        torch.save(training.states(), Path(folder, f"states{rank}"))
        dist.barrier()
        dist.destroy_process_group()
        go_on.set()
