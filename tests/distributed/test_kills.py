"""Ranks that are killed or stopped at random moments of training and saving: all end, and the newest save is whole."""

from __future__ import annotations

import random
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from protrain.checkpoint.manifest import list_saves, read_manifest
from tests.distributed.apart import Ending, Group
from tests.distributed.saves import FIRST, FOURTH, SECOND, THIRD, Training
from tests.engine.harness import Spec, assert_same
from tests.engine.profiles import share_profiles

SEED = 20251126
KINDS = (
    (signal.SIGKILL, "one"),
    (signal.SIGKILL, "one"),
    (signal.SIGKILL, "all"),
    (signal.SIGKILL, "rank 0 while saving"),
    (signal.SIGKILL, "rank 0 while saving"),
    (signal.SIGSTOP, "one"),
    (signal.SIGSTOP, "rank 0 while saving"),
)
MICRO_BATCHES = 6  # of a step, which two and three ranks share
TIMEOUT_S = 15.0  # of the process group where a rank is to be stopped: after it the others end. No step takes as long
ERROR = "protrain.common.errors.MisuseError: "
SPECS = (FIRST, SECOND, THIRD, FOURTH)


def save_forever(rank: int, size: int, spec: Spec, folder: str, timeout: timedelta | None) -> None:
    """Go on from the newest save, if there is one, and save after every step until something happens."""
    torch.set_num_threads(1)
    share_profiles(pytest.MonkeyPatch())
    dist.init_process_group("gloo", timeout=timeout)
    training = Training(rank, size, spec, micro_batches=MICRO_BATCHES)
    print("begun", flush=True)
    if list_saves(folder):
        training.load(folder)
    while True:
        training.train_one()
        training.save(folder)


class Undisturbed:
    """The training that nothing disturbs, on one rank, and another one that loads what the disturbed ones save."""

    def __init__(self) -> None:
        self._training, self._loaded = (Training(0, 1, spec, micro_batches=MICRO_BATCHES) for spec in (SECOND, THIRD))
        self._states: list[dict[str, Any]] = [self._training.states()]

    def check(self, folder: Path) -> None:
        """The newest save in ``folder``, if there is one, is whole and has the bits of its step."""
        saves = list_saves(folder)
        if not saves:
            return
        step = read_manifest(saves[-1])["step"]
        assert saves[-1].name.endswith(f"-step-{step}")
        while len(self._states) <= step:
            self._training.train_one()
            self._states.append(self._training.states())
        self._loaded.load(str(saves[-1]))
        assert_same(self._loaded.states(), self._states[step], where=str(saves[-1]))


def serial(folder: Path) -> int:
    """The number of the newest save, or 0."""
    saves = list_saves(folder)
    return int(saves[-1].name[:5]) if saves else 0


def wait_for_save(group: Group, folder: Path, number: int) -> None:
    """Wait until ``folder`` has a save of this number."""
    group.wait_until(lambda: serial(folder) >= number)


def check_ending(ending: Ending, victim: int, number: signal.Signals) -> None:
    """A rank has ended because of a single error, which names the victim."""
    assert ending.status == 1, ending.text
    (error,) = ending.errors
    if number == signal.SIGKILL:
        assert error == f"{ERROR}rank {victim} has died: its process was killed or crashed. See what it printed last"
    else:
        found = re.match(rf"{ERROR}rank \d has waited (\d+) s for ranks? (.*?) in ", error)
        assert found is not None, error
        assert int(found[1]) >= TIMEOUT_S
        assert str(victim) in found[2]


@pytest.mark.slow
def test_random_moments(tmp_path: Path) -> None:
    """Ranks are killed or stopped at a moment of each kind. After each, other ranks go on from the newest save."""
    draw, undisturbed, saves = random.Random(SEED), Undisturbed(), tmp_path / "saves"
    saves.mkdir()
    specs = draw.sample(SPECS, k=len(KINDS), counts=[2] * len(SPECS))
    for moment, (number, who) in enumerate(draw.sample(KINDS, k=len(KINDS))):
        size, spec, count = draw.choice((2, 2, 3)), specs[moment], draw.choice((0, 1, 1, 2))
        victims = {"one": [draw.randrange(size)], "all": list(range(size)), "rank 0 while saving": [0]}[who]
        count = max(count, who == "rank 0 while saving")  # the first save removes what killed ones have left
        part = draw.random()
        printed = tmp_path / str(moment)
        printed.mkdir()
        said = f"moment {moment}: {number.name} to {who} {victims} of {size} under {spec}, {count + part:.3f} saves"
        timeout = timedelta(seconds=TIMEOUT_S) if number == signal.SIGSTOP else None
        try:
            with Group(size, save_forever, spec, str(saves), timeout, folder=printed) as group:
                for rank in range(size):
                    group.wait_for("begun", rank=rank)
                begun, last = time.monotonic(), serial(saves) + count
                wait_for_save(group, saves, last)
                if who == "rank 0 while saving":
                    group.wait_until(lambda: any(saves.glob(".*.tmp")))
                    time.sleep(part * 0.01)
                else:
                    time.sleep(part * ((time.monotonic() - begun) / count if count else 0.2))
                for victim in victims:
                    group.send(victim, number)
                others = [rank for rank in range(size) if rank not in victims]
                for ending in group.endings(others).values():
                    check_ending(ending, victims[0], number)
            assert serial(saves) >= last, "a save is lost"
            undisturbed.check(saves)
        except Exception as error:
            error.add_note(f"with seed {SEED}: {said}")
            raise
