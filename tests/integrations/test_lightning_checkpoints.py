"""Checkpoints of Lightning, whose model and optimizer each rank saves for itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.pool import on_ranks
from tests.engine.harness import assert_same
from tests.integrations import lightning_runs
from tests.integrations.lightning_runs import (
    STEPS,
    Module,
    Run,
    fit,
    fit_on_rank,
    lightning,
    loader,
    make_trainer,
    protrain_strategy,
)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def refuse_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error for whoever takes a whole state where there is a plan."""
    from protrain.engine.states import parameter_state
    from protrain.engine.weights.state_hooks import StateHooks

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a whole state was taken")

    monkeypatch.setattr(parameter_state, "export_state", refuse)
    monkeypatch.setattr(StateHooks, "export", refuse)


def assert_goes_on(resumed: Run, whole: Run) -> None:
    """The resumed run has the bits of the second half of the whole one."""
    assert resumed.losses
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert_same(resumed.weights, whole.weights)


def checkpoints(folder: Path | str, **arguments: Any) -> Any:
    return lightning.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=3, **arguments)


FIT: dict[str, Any] = {"enable_checkpointing": True, "gradient_clip_val": 0.5, "limit_val_batches": 0}


def equal_batches() -> DataLoader[Any]:
    """As many as ``loader`` has, all of one row: Lightning begins a resumed epoch with its first batch."""
    rows, target = next(iter(loader()))
    return DataLoader(TensorDataset(rows[:1].repeat(48, 1), target[:1].repeat(48, 1)), batch_size=len(rows))


def whole_and_resumed_on_rank(rank: int, folder: Path) -> tuple[Run, Run]:
    """A fit that saves at step 3, and one that goes on from there. Nothing is gathered before they end."""
    accumulated = 2 // int(os.environ.get("WORLD_SIZE", 1))
    runs = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, resume in (("whole", None), ("resumed", folder / "whole" / "step=3.ckpt")):
            monkeypatch.setattr(lightning_runs, "loader", equal_batches)
            callbacks = [checkpoints(folder / name, filename="{step}", save_top_k=-1), Guard(monkeypatch)]
            runs.append(
                fit(
                    folder / name, protrain_strategy(), resume=resume, callbacks=callbacks,
                    accumulate_grad_batches=accumulated, **FIT,
                )
            )  # fmt: skip
    whole, resumed = ([*run.losses[:-1]] for run in runs)  # the last one is the mean of an epoch
    return Run(whole, runs[0].weights), Run(resumed, runs[1].weights)


Callback: Any = lightning.Callback


class Guard(Callback):
    """Lets nobody take a whole state while a fit runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def on_train_start(self, trainer: Any, module: Any) -> None:
        refuse_gathering(self.monkeypatch)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.monkeypatch.undo()


def test_a_resumed_fit_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed_on_rank(0, tmp_path)
    assert_goes_on(resumed, whole)
    assert len(resumed.losses) < len(whole.losses)


def test_a_resumed_fit_of_two_processes_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    for whole, resumed in on_ranks(2, whole_and_resumed_on_rank, tmp_path):
        assert_goes_on(resumed, whole)
    [save] = (tmp_path / "whole" / "step=3.ckpt").glob("*-step-3")
    assert len(list(save.glob("state-*"))) == 2  # each rank has written its own


def test_a_fit_with_an_example_batch_goes_on(tmp_path: Path) -> None:
    """There the plan comes before the load, and elsewhere the first batch of the resumed fit does."""
    batch = next(iter(loader()))
    whole = fit(tmp_path, protrain_strategy(example_batch=batch), callbacks=[checkpoints(tmp_path)], **FIT)
    [found] = tmp_path.glob("epoch=*.ckpt")
    assert found.name.endswith("step=6.ckpt")
    longer = {**FIT, "max_steps": STEPS + 2}
    resumed = fit(tmp_path / "a", protrain_strategy(example_batch=batch), resume=found, **longer)
    late = fit(tmp_path / "b", protrain_strategy(), resume=found, **longer)
    assert_goes_on(late, resumed)
    assert len(whole.losses) > 2


def test_checkpoints_are_kept_linked_and_removed_as_files_are(tmp_path: Path) -> None:
    callback = checkpoints(tmp_path, save_top_k=1, monitor="step", mode="max", save_last=True)
    fit(tmp_path / "end", protrain_strategy(), callbacks=[callback], **FIT)
    assert sorted(each.name for each in tmp_path.glob("*.ckpt")) == [Path(callback.best_model_path).name, "last.ckpt"]
    saves = [each.name for each in (tmp_path / "last.ckpt").iterdir() if each.is_dir()]
    assert [name.partition("-")[2] for name in saves] == ["step-6"]  # it was replaced
    assert not list(tmp_path.glob(".*"))


def test_best_weights_are_validated_and_tested(tmp_path: Path) -> None:
    module, callback = Module(), checkpoints(tmp_path, filename="{step}", save_top_k=-1)
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [callback], "limit_val_batches": 0}
    trainer = make_trainer(tmp_path, protrain_strategy(), **saving)
    trainer.fit(module, loader())
    trainer.limit_val_batches = 1.0
    [after] = trainer.validate(module, loader(), verbose=False)
    [before] = trainer.validate(module, loader(), ckpt_path=tmp_path / "step=3.ckpt", verbose=False)
    assert before["validation"] != after["validation"]
    assert trainer.validate(module, loader(), ckpt_path=tmp_path / "step=6.ckpt", verbose=False) == [after]
    other = make_trainer(tmp_path, protrain_strategy())
    with pytest.raises(ValueError, match="elsewhere use a checkpoint with save_weights_only=True"):
        other.validate(Module(), loader(), ckpt_path=tmp_path / "step=6.ckpt", verbose=False)


def weights_on_rank(rank: int, folder: Path) -> Run:
    callback = checkpoints(folder, filename="weights", save_weights_only=True)
    return fit_on_rank(rank, folder, True, callbacks=[callback], **FIT)


def test_weights_alone_are_a_file_that_any_trainer_reads(tmp_path: Path) -> None:
    ours, _ = on_ranks(2, weights_on_rank, tmp_path)
    assert_same(Module.load_from_checkpoint(tmp_path / "weights.ckpt").state_dict(), ours.weights)


def test_a_torn_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from protrain import CheckpointError
    from protrain.checkpoint import saving

    fit(tmp_path, protrain_strategy(), **FIT)
    write = saving.write_parameters

    def tear(*arguments: Any) -> Any:
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(saving, "write_parameters", tear)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path / "torn", protrain_strategy(), callbacks=[checkpoints(tmp_path / "torn")], **FIT)
    assert not list((tmp_path / "torn").glob("*.ckpt"))  # so no ckpt_path="last" can mean it
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, protrain_strategy(), **FIT)  # the earlier checkpoint of that name stays
    monkeypatch.undo()
    fit(tmp_path / "a", protrain_strategy(), resume=tmp_path / "end.ckpt", **{**FIT, "max_steps": STEPS + 1})
    with pytest.raises(ValueError, match="is a URL"):
        fit(tmp_path, protrain_strategy(), callbacks=[checkpoints("memory://somewhere")], **FIT)
    [save] = (tmp_path / "end.ckpt").glob("*-step-*")
    (save / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        fit(tmp_path / "b", protrain_strategy(), resume=tmp_path / "end.ckpt", **FIT)
    save.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        fit(tmp_path / "c", protrain_strategy(), resume=tmp_path / "end.ckpt", **FIT)
