"""A save beside the training has the state of the moment at which it was asked for, or is not there."""

from __future__ import annotations

import shutil
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch

import protrain
from protrain.checkpoint.manifest import list_saves
from protrain.common.tables import format_bytes
from tests.distributed import async_saves
from tests.distributed.apart import Group
from tests.distributed.async_saves import (
    fail_to_save,
    held,
    save_and_end_the_group,
    save_and_train,
    save_and_wait_to_be_killed,
    save_twice,
    save_without_a_store,
)
from tests.distributed.pool import on_ranks
from tests.distributed.saves import SECOND, THIRD, Run, Training, go_on
from tests.engine.harness import assert_same


@pytest.mark.slow
def test_training_goes_on_and_does_not_change_what_is_saved(tmp_path: Path) -> None:
    found = on_ranks(3, save_and_train, 3, str(tmp_path), timeout_s=200)
    (save,) = list_saves(tmp_path)
    saved, final = found[0][:2]
    assert not torch.equal(saved["exp_avg.blocks.1.first.weight"], final["exp_avg.blocks.1.first.weight"])
    assert [rest for _, _, *rest in found] == [[0, str(save)]] * 3, "it is there when the last rank has written"
    # Three ranks have three micro-batches, and so has one that goes on.
    for outcome in on_ranks(3, go_on, 3, Run(SECOND, load=str(tmp_path), after=range(2, 4)), timeout_s=200):
        assert_same(outcome.saved, saved)
        assert_same(outcome.final, final)
    assert_same(go_on(0, 1, Run(THIRD, load=str(tmp_path))).saved, saved)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_another_save_and_a_load_wait_for_it(tmp_path: Path, size: int) -> None:
    how = (size, str(tmp_path))
    names = [save_twice(0, *how)] if size == 1 else on_ranks(size, save_twice, *how, timeout_s=200)
    assert names == [["00002-step-2", "00003-step-3"]] * size


@pytest.mark.slow
def test_a_full_disk_of_one_rank_is_an_error_on_all_and_leaves_the_earlier_save(tmp_path: Path) -> None:
    for text, warned, names in on_ranks(3, fail_to_save, 3, str(tmp_path), timeout_s=200):
        assert "cannot write" in text
        assert "state-00002-00001.safetensors" in text
        (place,) = {file for said, file in warned if said.startswith("an async_save has failed: OSError: cannot write")}
        assert place == async_saves.__file__, "the script's"
        assert names == ["00001-step-0"]


def test_a_store_that_is_gone_is_an_error_on_all_and_leaves_the_folder_free(tmp_path: Path) -> None:
    expected = "the store is gone", ["00001-step-1"]
    assert on_ranks(2, save_without_a_store, 2, str(tmp_path)) == [expected] * 2


def test_the_result_is_the_error_where_warnings_are_errors(tmp_path: Path) -> None:
    training = Training(0, 1, None)
    training.train(range(1))
    with held() as go_on, warnings.catch_warnings(action="error"):
        save = protrain.async_save(tmp_path, training.model, training.optimizer, scheduler=training.scheduler)
        (scratch,) = tmp_path.glob(".*.tmp")
        shutil.rmtree(scratch)
        go_on.set()
        with pytest.raises(OSError, match="was deleted while it was written"):
            save.result()


def test_what_is_no_folder_is_named_beside_a_save_of_another_model(tmp_path: Path) -> None:
    one, other = Training(0, 1, None), Training(0, 1, None)
    for training in (one, other):
        training.train(range(1))
    protrain.async_save(tmp_path / "saves", one.model, one.optimizer).result()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ValueError, match="loop is no folder: give one to save to"):
        protrain.save_checkpoint(loop, other.model, other.optimizer)


def test_saves_and_loads_of_another_model_wait_for_one_to_their_folder(tmp_path: Path) -> None:
    """As of generator and discriminator: a save would take the unfinished one for what a killed process has left."""
    one, other = Training(0, 1, None), Training(0, 1, None)
    for training in (one, other):
        training.train(range(1))
    with held() as go_on:
        first = protrain.async_save(tmp_path, one.model, one.optimizer, scheduler=one.scheduler, extra="one")
        threading.Timer(0.1, go_on.set).start()
        other.save(str(tmp_path), extra="other")
    assert [first.result(), tmp_path / "00002-step-1"] == list_saves(tmp_path)
    with held() as go_on:
        protrain.async_save(tmp_path, one.model, one.optimizer, scheduler=one.scheduler, extra="again")
        threading.Timer(0.1, go_on.set).start()
        assert other.load(str(tmp_path)) == "again"


def test_it_is_refused_where_the_plan_leaves_no_memory_for_a_copy(tmp_path: Path) -> None:
    training = Training(0, 1, SECOND)  # its four micro-batches a step make the harness give no more than the plan takes
    sizes = {name: p.numel() * (12 if p.requires_grad else 4) for name, p in training.model.named_parameters()}
    with pytest.raises(protrain.BudgetError) as raised:
        protrain.async_save(tmp_path, training.model, training.optimizer)
    assert f"needs {format_bytes(sum(sizes.values()))} of host memory for a copy" in str(raised.value)
    assert "the plan leaves 0 " in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_leaves_the_earlier_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Group(3, save_and_wait_to_be_killed, str(folder), folder=tmp_path) as group:
        group.wait_until(lambda: all((folder / f"rank{rank}").exists() for rank in range(3)))
        group.send(2, signal.SIGKILL)
        endings = group.endings(range(3), timeout_s=30)
    assert [endings[rank].status for rank in range(3)] == [1, 1, -signal.SIGKILL]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["00001-step-1"], "the unfinished one is gone"
    loaded = Training(0, 1, THIRD)
    loaded.load(str(folder))
    assert_same(loaded.states(), torch.load(folder / "states0"))


@pytest.mark.slow
def test_a_script_may_end_the_process_group_while_it_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Group(2, save_and_end_the_group, str(folder), folder=tmp_path) as group:
        endings = group.endings(range(2), timeout_s=60)
    assert [endings[rank].status for rank in range(2)] == [0, 0]
    loaded = Training(0, 1, THIRD)
    loaded.load(str(folder))
    assert_same(loaded.states(), torch.load(folder / "states0"))


def test_it_goes_where_the_process_worked_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(0, 1, None)
    training.train(range(1))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    with held() as go_on:
        saved = protrain.async_save("saves", training.model, training.optimizer, scheduler=training.scheduler)
        monkeypatch.chdir(tmp_path / "other")
        go_on.set()
        assert saved.result() == tmp_path / "one" / "saves" / "00001-step-1"
    assert list_saves(tmp_path / "one" / "saves") == [saved.result()]
    assert not list((tmp_path / "other").iterdir())
