"""Trainings that signals stop."""

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

from transformers import TrainerCallback

from protrain.common.signals import SIGNALS
from tests.integrations.clients import make


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
