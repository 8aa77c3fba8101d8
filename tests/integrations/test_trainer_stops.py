"""Signals that stop a Trainer: all ranks save the step that runs, and a resume has the bits of a run without a stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protrain.common.signals import SIGNALS
from tests.distributed.apart import Group
from tests.distributed.pool import on_ranks
from tests.integrations.clients import Run, train, train_on_rank
from tests.integrations.stop_runs import Ending, Stop, in_terminal, stopped, stopped_on_rank, with_workers
from tests.integrations.test_trainer_saves import assert_same

DEFAULT = [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]
ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_steps": 100}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training that nothing stops."""
    return train("Trainer", tmp_path_factory.mktemp("whole"), on_protrain=True, **ACCUMULATED)


def ended_by(number: signal.Signals, checkpoint: str = "checkpoint-3", done: tuple[str, ...] = ()) -> Ending:
    """The end of a training that ``number`` has stopped."""
    interrupted = number == signal.SIGINT
    return Ending(
        raised=KeyboardInterrupt if interrupted else SystemExit,
        status=None if interrupted else 128 + number,
        done=list(done),
        checkpoints=[checkpoint] if checkpoint else [],
        handlers=DEFAULT,
    )


STEP = ("on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log")


@pytest.mark.parametrize("number", SIGNALS)
def test_one_checkpoint_is_saved_and_resumed(
    number: signal.Signals, whole: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ending = stopped("Trainer", tmp_path, Stop(number), **ACCUMULATED)
    assert ending == ended_by(number, done=(*STEP, "on_save"))
    said = [line for line in capfd.readouterr().err.splitlines() if number.name in line]
    assert said == [
        f"protrain: {number.name}: the training saves the step that runs and ends; a second signal ends it at once",
        f"protrain: {number.name} has stopped the training after step 3, which checkpoint-3 has",
    ]
    assert_same(train("Trainer", tmp_path, on_protrain=True, resume=True, **ACCUMULATED), whole)


# The signal comes to the first rank alone, to the other one, or to both, as torchrun and terminals send it.
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_two_ranks_save_the_same_step(ranks: tuple[int, ...], tmp_path: Path) -> None:
    stop = Stop(signal.SIGTERM, ranks=ranks)
    endings = on_ranks(2, stopped_on_rank, "Trainer", tmp_path / "stopped", stop, ACCUMULATED)
    assert endings == [ended_by(signal.SIGTERM, done=(*STEP, "on_save"))] * 2
    resumed = on_ranks(2, train_on_rank, "Trainer", tmp_path / "stopped", True, {"resume": True, **ACCUMULATED})
    whole = on_ranks(2, train_on_rank, "Trainer", tmp_path / "whole", True, ACCUMULATED)
    for one, other in zip(resumed, whole, strict=True):
        assert_same(one, other)


def test_an_evaluation_is_left(tmp_path: Path) -> None:
    arguments = {"per_device_eval_batch_size": 1, "eval_steps": 2}
    stop = Stop(signal.SIGINT, "on_prediction_step")
    assert stopped("Trainer", tmp_path / "one", stop, **arguments) == ended_by(
        signal.SIGINT, "checkpoint-2", done=("on_save",)
    )
    stop = Stop(signal.SIGINT, "on_prediction_step", ranks=(1,))
    endings = on_ranks(2, stopped_on_rank, "Trainer", tmp_path / "two", stop, arguments)
    assert endings == [ended_by(signal.SIGINT, "checkpoint-2", done=("on_save",))] * 2


# By what the stop is: the checkpoint that is saved, and the events after the signal.
OTHERS: dict[str, tuple[Stop, dict[str, Any], str, tuple[str, ...]]] = {
    "in the first step": (Stop(signal.SIGINT, "on_step_begin", 0), {}, "", ()),
    "twice": (Stop(signal.SIGINT, times=2), {}, "", ()),
    "at the end of an epoch": (
        Stop(signal.SIGTERM, "on_epoch_end"),
        {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 6, "save_steps": 2},
        "checkpoint-2",
        (),
    ),
    "after the last step": (Stop(signal.SIGTERM, "on_train_end"), {}, "checkpoint-4", ()),
    "without checkpoints": (Stop(signal.SIGTERM), {"save_strategy": "no"}, "", STEP),
}


@pytest.mark.parametrize("when", OTHERS)
def test_other_moments(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, arguments, checkpoint, done = OTHERS[when]
    if stop.times > 1:  # so soon after the first one, the second counts as the same
        monkeypatch.setattr("protrain.common.signals._ONE_REQUEST_S", 0.0)
    ending = stopped("Trainer", tmp_path, stop, **(ACCUMULATED | arguments))
    assert ending == ended_by(stop.number, checkpoint, done)


@pytest.mark.parametrize(("run", "number"), [(in_terminal, signal.SIGHUP), (with_workers, signal.SIGTERM)])
def test_what_else_gets_the_signal_does_not_end_the_step(
    run: Callable[[int, int, str], None], number: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Group(1, run, str(folder), folder=tmp_path) as group:
        (ending,) = group.endings([0], timeout_s=60).values()
    assert ending.status == 128 + number, ending.text
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_handler_of_the_user_stays(tmp_path: Path) -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        ending = stopped("Trainer", tmp_path, Stop(signal.SIGTERM), **ACCUMULATED)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
    assert ending.raised is None
    assert ending.checkpoints == ["checkpoint-4"]
