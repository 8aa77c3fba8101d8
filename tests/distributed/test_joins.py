"""A rank that dies or fails while ranks find each other ends the others within seconds. A slow one is waited for."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import protrain
from protrain.common.errors import MisuseError
from protrain.distributed import joining
from protrain.distributed.links import Links, Message
from tests.distributed import out_of_step
from tests.distributed.apart import Ending, Group
from tests.distributed.saves import Training
from tests.distributed.test_async_save import held

GROUPS = ("the start of the process group", "control", "gathers", "reductions")  # in the order in which they start


def die() -> None:
    """End without a word."""
    print(f"dies at {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    """Raise an error."""
    print(f"fails at {time.time()}", flush=True)
    raise ArithmeticError("a rank fails")


def be_busy() -> None:
    """Be busy for three seconds in which no other thread of this process runs, as a compiler may be."""
    ctypes.PyDLL(None).sleep(3)


def before(place: str, act: Callable[[], None]) -> None:
    """Let this process ``act`` before it takes part in what starts at ``place``."""
    start, left = dist.distributed_c10d._new_process_group_helper, GROUPS.index(place)

    def act_and_start(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            dist.distributed_c10d._new_process_group_helper = start
            act()
        return start(*args, **options)

    dist.distributed_c10d._new_process_group_helper = act_and_start


def join(rank: int, size: int, odd: int, place: str, act: Callable[[], None], times: dict[str, float]) -> None:
    """Begin a training. Rank ``odd`` does ``act`` at ``place``. ``times`` changes those of the watcher, in seconds."""
    out_of_step.set_times(times)
    if rank == odd:
        before(place, act)
    out_of_step.do(rank, size, -1, "", {}, 1)


ERROR = "protrain.common.errors.MisuseError: "
DIED = ERROR + "rank {} has died: its process was killed or crashed. See what it printed last"


def end_without(group: Group, size: int, odd: int) -> dict[int, Ending]:
    """How all ranks but ``odd`` end, which do so once that one has died or failed."""
    group.endings([odd])
    return group.endings([rank for rank in range(size) if rank != odd])


@pytest.mark.parametrize(
    ("size", "odd", "place"),
    [
        (2, 1, GROUPS[0]),
        (2, 0, GROUPS[1]),
        pytest.param(3, 2, GROUPS[3], marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed(tmp_path: Path, size: int, odd: int, place: str) -> None:
    with Group(size, join, odd, place, die, {}, folder=tmp_path, frees_modules=size == 3) as group:
        for ending in end_without(group, size, odd).values():
            assert ending.status == 1
            assert ending.errors == [DIED.format(odd)], ending.text


@pytest.mark.slow
def test_a_rank_fails(tmp_path: Path) -> None:
    with Group(3, join, 0, GROUPS[3], fail, {}, folder=tmp_path) as group:
        for ending in end_without(group, 3, 0).values():
            assert ending.status == 1
            (error,) = ending.errors
            assert error.startswith(f"{ERROR}rank 0 has raised an exception"), error
            assert error.endswith("in the start of a process group of gloo: ArithmeticError: a rank fails"), error


@pytest.mark.slow
@pytest.mark.parametrize("place", GROUPS[::3])
def test_a_busy_rank_is_waited_for(tmp_path: Path, place: str) -> None:
    times = {"TICK_S": 0.2, "WARN_S": 1.5, "CAUGHT_S": 0.5}
    with Group(2, join, 1, place, be_busy, times, folder=tmp_path) as group:
        endings = group.endings(range(2))
    for ending in endings.values():
        assert ending.status == 0, ending.text
        assert "\ntrained\n" in ending.text
    assert re.search(r"UserWarning: rank 0 has waited \d+ s for (rank 1|other ranks) in the start of ", endings[0].text)


def test_a_launcher_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    announced = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**announced, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "CONNECT", timedelta(seconds=0.1))
    with pytest.raises(dist.DistNetworkError):
        joining.start_group()


def received(links: Links, count: int) -> list[tuple[int, Message | None]]:
    """The first ``count`` messages that have something to say."""

    def all_said() -> Iterator[tuple[int, Message | None]]:
        for _ in range(20):
            yield from (each for each in links.receive(0.2) if each[1] != [])

    found = all_said()
    return [next(found) for _ in range(count)]


def test_a_rank_that_was_killed_after_it_had_left_its_address_is_named() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("0", json.dumps(("127.0.0.1", server.getsockname()[1])))
    with pytest.raises(MisuseError, match="rank 0 has died"):
        Links(1, 3, store)


def test_strangers_are_not_listened_to() -> None:
    store = dist.HashStore()
    links = Links(0, 2, store)
    address = "127.0.0.1", json.loads(store.get("0"))[1]
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\4abcd", b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(said)
    assert [links.receive(0.2) for _ in range(6)] == [[]] * 6
    other = Links(1, 2, store)
    other.send(["a rank"])
    assert received(links, 1) == [(1, ["a rank"])]


def wait_and_die() -> None:
    """End when others wait."""
    time.sleep(1)
    die()


def save_end_the_group_and_die(rank: int, size: int, odd: int, folder: str) -> None:
    """Save in the background and end the process group. Then rank ``odd`` dies before it has written its part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(rank, size, None)
    training.train(range(1))
    with held(by=rank == odd):
        path = protrain.async_save(folder, training.model, training.optimizer, scheduler=training.scheduler)
        dist.barrier()
        dist.destroy_process_group()
        Path(folder, f"rank{rank}").touch()
        if rank == odd:
            wait_and_die()
        path.result()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_is_killed_while_it_writes_a_save_after_the_end_of_the_group(tmp_path: Path, odd: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with Group(2, save_end_the_group_and_die, odd, str(folder), folder=tmp_path) as group:
        (ending,) = end_without(group, 2, odd).values()
    assert ending.status == 1, ending.text
    (error,) = ending.errors
    assert error.startswith(f"{ERROR}async_save "), error
    assert ("the store of all ranks" if odd == 0 else "as rank 1 has ended") in error
