"""A Trainer on two ranks that is killed again and again: what goes on from its checkpoints has the bits of no kill."""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.apart import Group
from tests.integrations.kill_runs import FINAL, train_on
from tests.integrations.test_trainer_saves import assert_same_weights

SEED = 20261129
KILLS = (
    (signal.SIGKILL, [1]),
    (signal.SIGKILL, [0]),
    (signal.SIGKILL, [0, 1]),
    (signal.SIGTERM, [1]),
)
LIMIT_S = 240.0  # which only a rank that does not end by itself reaches
STEPS_S = 0.3  # about as long as the steps between two checkpoints take


def end_of(folder: Path, printed: Path) -> dict[str, Tensor]:
    """The weights at the end of the training in ``folder``, which goes on."""
    printed.mkdir()
    with Group(2, train_on, str(folder), folder=printed) as group:
        for ending in group.endings([0, 1], timeout_s=LIMIT_S).values():
            assert ending.status == 0, ending.text
    weights: dict[str, Tensor] = torch.load(folder / FINAL)
    return weights


def has_more(folder: Path, before: set[Path]) -> bool:
    """Whether another checkpoint than those of ``before`` is begun in ``folder``."""
    return bool(set(folder.glob("checkpoint-*")) - before)


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    run = tmp_path / "run"
    whole = end_of(tmp_path / "whole", tmp_path / "printed")
    for kill, (number, victims) in enumerate(KILLS):
        printed = tmp_path / str(kill)
        printed.mkdir()
        before = set(run.glob("checkpoint-*"))
        with Group(2, train_on, str(run), folder=printed) as group:
            group.wait_until(partial(has_more, run, before))
            time.sleep(draw.uniform(0.0, STEPS_S))
            for victim in victims:
                group.send(victim, number)
            others = [rank for rank in (0, 1) if number != signal.SIGKILL or rank not in victims]
            expected = 1 if number == signal.SIGKILL else 128 + number
            for ending in group.endings(others, timeout_s=LIMIT_S).values():
                assert ending.status == expected, f"kill {kill} with seed {SEED}: {ending.text}"
    assert_same_weights(end_of(run, tmp_path / "printed again"), whole)
