"""A rank that dies or fails while ranks find each other ends the others within seconds. A slow one is waited for."""

from __future__ import annotations

import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from protrain.distributed import joining
from tests.distributed.apart import Ending, Group
from tests.distributed.joins import (
    GROUPS,
    be_busy,
    die,
    fail,
    join,
    join_without_the_last,
    save_end_the_group_and_die,
)

WITHIN_S = 10.0
ERROR = "protrain.common.errors.MisuseError: "
DIED = ERROR + "rank {} has died: its process was killed or crashed. See what it printed last"


def end_in_time(group: Group, size: int, odd: int) -> dict[int, Ending]:
    """How all ranks but ``odd`` end, which do so in time once that one has died or failed."""
    group.wait_for_end(odd)
    return group.endings([rank for rank in range(size) if rank != odd], timeout_s=WITHIN_S)


@pytest.mark.parametrize(
    ("size", "odd", "place"),
    [
        pytest.param(2, 1, GROUPS[0]),
        pytest.param(2, 0, GROUPS[1]),
        pytest.param(3, 1, GROUPS[2], marks=pytest.mark.slow),
        pytest.param(3, 2, GROUPS[3], marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed(tmp_path: Path, size: int, odd: int, place: str) -> None:
    with Group(size, join, odd, place, die, {}, folder=tmp_path, frees_modules=size == 3) as group:
        for ending in end_in_time(group, size, odd).values():
            assert ending.status == 1
            assert ending.errors == [DIED.format(odd)], ending.text


@pytest.mark.slow
@pytest.mark.parametrize(("size", "odd", "place"), [(2, 1, GROUPS[1]), (3, 0, GROUPS[3])])
def test_a_rank_fails(tmp_path: Path, size: int, odd: int, place: str) -> None:
    with Group(size, join, odd, place, fail, {}, folder=tmp_path) as group:
        for ending in end_in_time(group, size, odd).values():
            assert ending.status == 1
            (error,) = ending.errors
            assert error.startswith(f"{ERROR}rank {odd} has raised an exception"), error
            assert error.endswith("in the start of a process group of gloo: ArithmeticError: a rank fails"), error


def test_a_rank_is_killed_while_another_has_not_come(tmp_path: Path) -> None:
    with Group(3, join_without_the_last, folder=tmp_path) as group:
        group.wait_for_end(1)
        (ending,) = group.endings([0], timeout_s=WITHIN_S).values()
    assert ending.errors == [DIED.format(1)], ending.text


@pytest.mark.slow
@pytest.mark.parametrize("place", GROUPS)
def test_a_busy_rank_is_waited_for(tmp_path: Path, place: str) -> None:
    times = {"TICK_S": 0.2, "WARN_S": 1.5, "CAUGHT_S": 0.5}
    with Group(2, join, 1, place, be_busy, times, folder=tmp_path) as group:
        endings = group.endings(range(2), timeout_s=60)
    for ending in endings.values():
        assert ending.status == 0, ending.text
        assert "\ntrained\n" in ending.text
    assert re.search(r"UserWarning: rank 0 has waited \d s for (rank 1|other ranks) in the start of ", endings[0].text)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_is_killed_while_it_writes_a_save_after_the_end_of_the_group(tmp_path: Path, odd: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Group(2, save_end_the_group_and_die, odd, str(folder), folder=tmp_path) as group:
        (ending,) = end_in_time(group, 2, odd).values()
    assert ending.status == 1, ending.text
    (error,) = ending.errors
    assert error.startswith(f"{ERROR}async_save "), error
    assert ("the store of all ranks" if odd == 0 else "as rank 1 has ended") in error


@pytest.mark.timeout(60)
def test_a_launcher_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    announced = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**announced, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "CONNECT", timedelta(seconds=0.1))
    with pytest.raises(dist.DistNetworkError):
        joining.start_group()
