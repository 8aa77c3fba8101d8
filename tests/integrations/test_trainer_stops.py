"""Signals that stop a Trainer: all ranks save the step that runs, and a resume has the bits of a run without a stop."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from transformers import TrainerCallback

from protrain.common.signals import SIGNALS
from tests.distributed.apart import Group
from tests.distributed.pool import on_ranks
from tests.integrations.clients import Run, make, train, train_on_rank
from tests.integrations.test_trainer_saves import assert_same_runs


@dataclass(frozen=True)
class Stop:
    """A signal that this process sends itself at the ``event`` of a callback, once ``step`` steps are done."""

    number: signal.Signals
    event: str = "on_substep_end"
    step: int = 2
    ranks: tuple[int, ...] = (0,)  # that do
    times: int = 1

    def send(self) -> None:
        for _ in range(self.times):
            os.kill(os.getpid(), self.number)


@dataclass(frozen=True)
class Ending:
    """How a training ended."""

    raised: type[BaseException] | None
    status: int | None  # that a SystemExit asks for
    done: list[str]  # events after the signal, by callback
    checkpoints: list[str]
    handlers: list[Any]  # of signals, afterwards


class _Sends(TrainerCallback):
    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.done: list[str] = []

    def call(self, event: str, args: Any, state: Any) -> None:
        if self.done:
            self.done.append(event)
        elif event == self.stop.event and state.global_step >= self.stop.step:
            self.done.append(event)
            if args.process_index in self.stop.ranks:
                self.stop.send()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda args, state, control, **_: self.call(name, args, state)
        return super().__getattribute__(name)


def stopped(client: str, folder: Path, stop: Stop, **arguments: Any) -> Ending:
    """A training that ``stop`` comes to."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] == signal.SIG_IGN:  # as a shell may have it
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    trainer = make(client, folder, on_protrain=True, **({"save_steps": 100} | arguments))
    sends = _Sends(stop)
    trainer.add_callback(sends)
    raised: BaseException | None = None
    try:
        trainer.train()
    except (KeyboardInterrupt, SystemExit) as error:
        raised = error
    after = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in before.items():
        signal.signal(number, handler)
    return Ending(
        raised=None if raised is None else type(raised),
        status=raised.code if isinstance(raised, SystemExit) and isinstance(raised.code, int) else None,
        done=sends.done[1:],
        checkpoints=sorted(path.name for path in folder.glob("checkpoint-*")),
        handlers=after,
    )


def stopped_on_rank(rank: int, client: str, folder: Path, stop: Stop, arguments: dict[str, Any]) -> Ending:
    return stopped(client, folder, stop, **arguments)


class _Calls(TrainerCallback):
    """Calls a function in the third step."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_substep_end(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        if state.global_step == 2:
            self.call()


def in_terminal(rank: int, size: int, folder: str) -> None:
    """A training in a terminal that is closed, as by closing its window. It prints the loss of each step."""

    def close() -> None:
        os.close(terminal)
        os.kill(os.getpid(), signal.SIGHUP)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has tests ignore it, and a training that ignores it goes on
    terminal, own = pty.openpty()
    trainer = make("Trainer", Path(folder), on_protrain=True, gradient_accumulation_steps=2, save_steps=100)
    trainer.add_callback(_Calls(close))
    for stream in (1, 2):
        os.dup2(own, stream)
    os.close(own)
    trainer.train()


def with_workers(rank: int, size: int, folder: str) -> None:
    """A training whose loader has a worker. Both get SIGTERM, as torchrun sends it."""

    def send() -> None:
        group = f"-{os.getpgrp()}"
        subprocess.run(["kill", "-TERM", "--", group], start_new_session=True, check=True)
        sleep(0.5)  # in which torch would see that the worker is gone

    os.setpgrp()
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_steps": 100, "dataloader_num_workers": 1}
    trainer = make("Trainer", Path(folder), on_protrain=True, **arguments)
    trainer.add_callback(_Calls(send))
    trainer.train()


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
    assert_same_runs(train("Trainer", tmp_path, on_protrain=True, resume=True, **ACCUMULATED), whole)


# The signal comes to the first rank alone, to the other one, or to both, as torchrun and terminals send it.
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_two_ranks_save_the_same_step(ranks: tuple[int, ...], tmp_path: Path) -> None:
    stop = Stop(signal.SIGTERM, ranks=ranks)
    endings = on_ranks(2, stopped_on_rank, "Trainer", tmp_path / "stopped", stop, ACCUMULATED)
    assert endings == [ended_by(signal.SIGTERM, done=(*STEP, "on_save"))] * 2
    resumed = on_ranks(2, train_on_rank, "Trainer", tmp_path / "stopped", True, {"resume": True, **ACCUMULATED})
    whole = on_ranks(2, train_on_rank, "Trainer", tmp_path / "whole", True, ACCUMULATED)
    for one, other in zip(resumed, whole, strict=True):
        assert_same_runs(one, other)


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
