"""A checkpoint that any number of ranks has saved loads on any other, in little host memory, with the same bits."""

from __future__ import annotations

import gc
import math
import random
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import protrain
from protrain.checkpoint.manifest import list_saves, read_manifest, write_manifest
from tests.distributed.apart import Group
from tests.distributed.pool import error_of, on_ranks
from tests.distributed.training import FIRST, FOURTH, SECOND, THIRD, Run, Training, go_on, step
from tests.engine.harness import assert_same
from tests.engine.profiles import share_profiles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "moments", "next_size"),
    [("float32", "float32", 2), ("bfloat16", "bfloat16", 4), ("float16", "float32", 3)],
)
def test_a_save_of_any_number_of_ranks_loads_on_any_other(
    tmp_path: Path, dtype: str, moments: str, next_size: int
) -> None:
    """Four ranks save; one loads and saves that; and another number goes on from one of both with the same bits."""
    of_four, of_one = str(tmp_path / "4"), str(tmp_path / "1")
    begun = Run(FIRST, dtype, moments, save=of_four, before=range(2), after=range(2, 3))
    (saved, final), *_, (other, _) = on_ranks(4, go_on, 4, begun)
    assert_same(other, saved, where="another rank")
    assert not torch.equal(saved["exp_avg.blocks.1.first.weight"], final["exp_avg.blocks.1.first.weight"])

    goes_on = replace(begun, load=of_four, save=None, before=range(0))
    once = go_on(0, 1, replace(goes_on, spec=SECOND, save=of_one))
    assert_same(once[0], saved, where="four ranks to one")
    assert_same(once[1], final, where="four ranks to one, and on")
    run = {
        2: replace(goes_on, spec=THIRD),
        3: replace(goes_on, spec=FOURTH, after=range(0)),  # three ranks have fewer micro-batches a step
        4: replace(goes_on, spec=FOURTH, load=of_one),
    }[next_size]
    for loaded, trained in on_ranks(next_size, go_on, next_size, run):
        assert_same(loaded, saved, where=f"{run.load} to {next_size} ranks")
        if run.after:
            assert_same(trained, final, where=f"{run.load} to {next_size} ranks, and on")


def save_randoms(rank: int, size: int, folder: str) -> list[float]:
    """Save in the middle of random numbers that differ by rank. Returns those that follow."""
    training = Training(rank, size, THIRD)
    training.model.get_buffer("mark").fill_(rank + 5.0)
    torch.manual_seed(rank)
    random.seed(rank)
    training.save(folder, extra={"rank": rank})
    return [torch.rand(()).item(), random.random()]


def load_randoms(rank: int, size: int, folder: str) -> tuple[list[float], float, Any, list[str]]:
    """The next random numbers after a load, the buffer and ``extra`` of the save, and all warnings."""
    training = Training(rank, size, THIRD)
    torch.manual_seed(99)
    random.seed(99)
    with warnings.catch_warnings(record=True, action="always") as warned:
        extra = training.load(folder)
    texts = [str(warning.message) for warning in warned]
    return [torch.rand(()).item(), random.random()], float(training.model.get_buffer("mark")[0]), extra, texts


def test_each_rank_has_its_random_states_again_and_the_rest_of_rank_0(tmp_path: Path) -> None:
    expected = on_ranks(2, save_randoms, 2, str(tmp_path))
    assert expected[0] != expected[1]
    found = on_ranks(3, load_randoms, 3, str(tmp_path))
    torch.manual_seed(99)
    own = torch.rand(()).item()
    assert [numbers for numbers, *_ in found[:2]] == expected
    assert found[2][0][0] == own, "a rank that the save does not have keeps its random states"
    assert [texts for *_, texts in found[:2]] == [[], []]
    assert "was made by 2 processes, so it has no random states of rank 2, which keeps its own" in found[2][3][0]
    assert [(mark, extra) for _, mark, extra, _ in found] == [(5.0, {"rank": 0})] * 3


def fail_to_load(rank: int, size: int, folders: list[str]) -> list[tuple[str, bool]]:
    """The errors of loading ``folders``, and whether the training had all its states afterwards."""
    training = Training(rank, size, SECOND)
    training.train(range(2))
    before, found = training.states(), []
    for folder in folders:
        error, now = error_of(training.load, folder), training.states()
        found.append((error, all(torch.equal(now[name], before[name]) for name in before)))
    return found


@pytest.mark.slow
def test_damage_is_an_error_on_all_ranks_before_anything_changes(tmp_path: Path) -> None:
    """Each rank checks the bytes of some files only, so the one that finds the damage must tell the others."""
    whole = tmp_path / "whole"
    on_ranks(3, go_on, 3, Run(FIRST, save=str(whole), before=range(1)))
    expected = {
        "flipped": r"state-00001-00001.safetensors is damaged: its checksum differs",
        "missing": r"state-00002-00001.safetensors is missing",
        "gap": "does not have every element of",
        "end": "does not have every element of",
        "empty": "holds no checkpoint",
    }
    for kind in expected:
        shutil.copytree(whole, tmp_path / kind)
    save = list_saves(tmp_path / "flipped")[-1]
    data = bytearray((save / "state-00001-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (save / "state-00001-00001.safetensors").write_bytes(data)
    (list_saves(tmp_path / "missing")[-1] / "state-00002-00001.safetensors").unlink()
    _lose(list_saves(tmp_path / "gap")[-1], rank=0)
    _lose(list_saves(tmp_path / "end")[-1], rank=2)
    shutil.rmtree(list_saves(tmp_path / "empty")[-1])
    found = on_ranks(2, fail_to_load, 2, [str(tmp_path / kind) for kind in expected])
    for errors in found:
        for (text, unchanged), (kind, words) in zip(errors, expected.items(), strict=True):
            assert words in text, kind
            assert unchanged, kind


def _lose(save: Path, rank: int) -> None:
    """Let the manifest know nothing of one part of a parameter: the first or last, if ``rank`` is that."""
    manifest = read_manifest(save)
    entry = manifest["files"][f"state-{rank:05d}-00001.safetensors"]
    parts = entry["parameters"].items()
    del entry["parameters"][next(name for name, part in parts if part["elements"] != [0, math.prod(part["shape"])])]
    write_manifest(save, manifest)


# -- host memory -------------------------------------------------------------------------------------------------------


ROWS, WIDTH = 24_000, 1000
STATE_BYTES = 12 * ROWS * WIDTH  # of the embedding alone: its master and two moments in fp32
MOST_BYTES = {"save": 64 * 2**20, "load": 48 * 2**20}  # that all processes of a node may take together


class Large(nn.Module):
    """A model that is little more than one large parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 10)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers[0](self.embedding(x)).float().square().mean()
        return loss


def own_bytes() -> int:
    """The memory of this process, without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def taken_bytes(work: Callable[[], object]) -> int:
    """The most memory that the process has taken for ``work``."""
    gc.collect()
    before, found, ended = own_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.is_set():
            found.append(own_bytes() - before)
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max(found)


def save_and_load(rank: int, folder: str) -> dict[str, int]:
    batch = torch.tensor([[1, 2]])
    model: nn.Module = Large()
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device_memory": "1GiB", "host_memory": "2GiB", "progress": False}
    given = torch.optim.AdamW(model.parameters())
    model, optimizer = protrain.wrap(model, given, example_batch={"x": batch}, device="cpu", **how)
    step(model, optimizer, (batch,))
    return {
        "save": taken_bytes(lambda: protrain.save_checkpoint(folder, model, optimizer)),
        "load": taken_bytes(lambda: protrain.load_checkpoint(folder, model, optimizer)),
    }


@pytest.mark.slow
def test_a_large_parameter_takes_little_memory(tmp_path: Path) -> None:
    taken = on_ranks(2, save_and_load, str(tmp_path))
    for what, most_bytes in MOST_BYTES.items():
        assert 4 * most_bytes < STATE_BYTES, "a copy of the state would be found"
        assert sum(of_rank[what] for of_rank in taken) < most_bytes, (what, taken)


# -- a rank that is killed while it saves ------------------------------------------------------------------------------


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
