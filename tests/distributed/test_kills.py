"""Rank 0 is killed or stopped while it saves: the others end, and the newest save is whole and has the right bits."""

from __future__ import annotations

import re
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from protrain.checkpoint.manifest import list_saves, read_manifest
from tests.distributed.apart import Group
from tests.distributed.training import FIRST, SECOND, THIRD, Training
from tests.engine.harness import assert_same
from tests.engine.profiles import share_profiles

TIMEOUT_S = 15.0  # of the process group, after which the others end. No step takes as long
SAID = {
    signal.SIGKILL: "rank 0 has died: its process was killed or crashed. See what it printed last",
    signal.SIGSTOP: r"rank 1 has waited \d+ s for rank 0 in ",
}


def save_forever(rank: int, size: int, folder: str, timeout: timedelta | None) -> None:
    """Go on from the newest save, if there is one, and save after every step until something happens."""
    torch.set_num_threads(1)
    share_profiles(pytest.MonkeyPatch())
    dist.init_process_group("gloo", timeout=timeout)
    training = Training(rank, size, FIRST)
    if list_saves(folder):
        training.load(folder)
    while True:
        training.train_one()
        training.save(folder)


def saves_again(saves: Path, before: list[Path]) -> bool:
    """Whether the next save is under way, after another one than those of ``before``."""
    return list_saves(saves)[-1:] != before and any(saves.glob(".*.tmp"))


@pytest.mark.slow
def test_a_rank_is_killed_or_stopped_while_it_saves(tmp_path: Path) -> None:
    undisturbed, saves = Training(0, 1, SECOND), tmp_path / "saves"
    saves.mkdir()
    states = [undisturbed.states()]
    for moment, number in enumerate(SAID):
        printed, before = tmp_path / str(moment), list_saves(saves)[-1:]
        printed.mkdir()
        timeout = timedelta(seconds=TIMEOUT_S) if number == signal.SIGSTOP else None
        with Group(2, save_forever, str(saves), timeout, folder=printed) as group:
            group.wait_until(partial(saves_again, saves, before))
            group.send(0, number)
            (ending,) = group.endings([1]).values()
        assert ending.status == 1, ending.text
        (error,) = ending.errors
        assert re.match(f"protrain.common.errors.MisuseError: {SAID[number]}", error), ending.text
        newest = list_saves(saves)[-1]
        step = read_manifest(newest)["step"]
        while len(states) <= step:
            undisturbed.train_one()
            states.append(undisturbed.states())
        loaded = Training(0, 1, THIRD)
        loaded.load(str(newest))
        assert_same(loaded.states(), states[step], where=str(newest))
