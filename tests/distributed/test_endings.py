"""A rank that dies, fails or leaves ends the others within ten seconds, and they name it. A slow one is waited for."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import protrain
from protrain.distributed import joining, watch
from protrain.distributed.links import Links
from tests.distributed.apart import LIMIT_S, Group
from tests.distributed.test_async_save import held
from tests.distributed.test_out_of_step import FAULTS, step, train, wrapped
from tests.distributed.training import Training

WITHIN_S = 10.0  # under the watcher's own times
Act = Callable[[], object]
ERROR = "^protrain.common.errors.MisuseError: "


# -- what a rank does, and where ---------------------------------------------------------------------------------------


def nothing() -> None:
    """What the other ranks do."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("a rank fails")


def leave() -> None:
    raise SystemExit


def between_steps(act: Act, folder: Path, *, device: str = "cpu") -> None:
    """Train, and ``act`` before the third step."""
    model, optimizer = wrapped(device=device)
    for at in range(8):
        if at == 2:
            act()
        step(model, optimizer, device)


def at_start(number: int, act: Act, folder: Path) -> None:
    """Train, and ``act`` before this rank takes part in the start of a group: 0 is the default one, 1 is of control."""
    module: Any = dist.distributed_c10d
    start, before = module._new_process_group_helper, [nothing] * number + [act]

    def act_and_start(*args: Any, **options: Any) -> Any:
        if before:
            before.pop(0)()
        return start(*args, **options)

    module._new_process_group_helper = act_and_start
    between_steps(nothing, folder)


def with_a_child(act: Act, folder: Path) -> None:
    """Train, with a child that has the connections of gloo, too, as a DataLoader has, and outlives this process."""
    wrapped()
    if os.fork() == 0:
        end = time.monotonic() + LIMIT_S
        while not (folder / "over").exists() and time.monotonic() < end:
            time.sleep(0.1)
        os._exit(0)
    between_steps(act, folder)


def and_end_the_group(act: Act, folder: Path) -> None:
    """Train, in a script that ends its process group whatever happens, and is busy afterwards."""
    dist.init_process_group("gloo")
    try:
        between_steps(act, folder)
    finally:
        dist.destroy_process_group()
        time.sleep(1.0)  # as for a logger that says goodbye


def in_a_forward(act: Act, folder: Path) -> None:
    """Train, and ``act`` in the second step. The script catches an error and does not go on."""
    model, optimizer = wrapped()
    step(model, optimizer)
    model.get_submodule("blocks.1").register_forward_pre_hook(lambda *_: act())
    with suppress(ArithmeticError):
        step(model, optimizer)
    time.sleep(LIMIT_S)


def in_the_profile(act: Act, folder: Path) -> None:
    """``act`` in the profile of a model, whose forward waits for all ranks."""
    dist.init_process_group("gloo")

    def meet(*_: object) -> None:
        act()
        dist.all_reduce(torch.ones(1))

    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(meet)
    protrain.wrap(model, torch.optim.AdamW(model.parameters()), example_batch=(torch.ones(1, 2),), device="cpu")


def after_the_group(act: Act, folder: Path) -> None:
    """``act`` before this rank has written its part of a save, where the script has ended the process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(dist.get_rank(), dist.get_world_size(), None)
    training.train(range(1))
    with held(by=act is not nothing):
        path = training.save_beside(str(folder))
        dist.barrier()
        dist.destroy_process_group()
        act()
        path.result()


@dataclass(frozen=True)
class End:
    """Rank ``odd`` of ``size`` does ``act`` in ``script``, and the others print ``said``, a pattern."""

    size: int
    odd: int
    script: Callable[[Act, Path], None]
    act: Act
    said: str


DIED = ERROR + "rank {} has died: its process was killed or crashed. See what it printed last$"
FAILED = "ArithmeticError: a rank fails$"
ENDS = {
    "killed": End(2, 1, with_a_child, die, DIED.format(1)),
    "failed": End(2, 0, between_steps, fail, ERROR + f"rank 0 has raised an exception, while rank 1 .*: {FAILED}"),
    "failed, and ends its group": End(
        2, 1, and_end_the_group, fail, ERROR + f"rank 1 has raised an exception, while rank 0 .*: {FAILED}"
    ),
    "left": End(2, 1, between_steps, leave, ERROR + "rank 1 has ended, while rank 0 went on to "),
    "caught its error": End(
        2, 1, in_a_forward, fail, ERROR + f"rank 1 has raised an exception in a forward, while rank 0 .*: {FAILED}"
    ),
    "failed in the profile": End(
        3,
        1,
        in_the_profile,
        fail,
        f"^The ranks are out of step: .*rank 1 has raised an exception in protrain.wrap.*: {FAILED}",
    ),
    "killed before it has a group": End(2, 1, partial(at_start, 0), die, DIED.format(1)),
    "killed before the last": End(3, 2, partial(at_start, 3), die, DIED.format(2)),
    "failed before the last": End(
        3, 0, partial(at_start, 3), fail, ERROR + f"rank 0 has raised .* in the start of a process group .*: {FAILED}"
    ),
    "killed as rank 0 that writes a save": End(
        2, 0, after_the_group, die, ERROR + "async_save .* the store of all ranks"
    ),
    "killed as rank 1 that writes a save": End(2, 1, after_the_group, die, ERROR + "async_save .* as rank 1 has ended"),
}
SLOW = pytest.mark.slow
QUICKEST = ("killed", "failed", "killed before it has a group")


@contextmanager
def counted(fault: Path) -> Iterator[None]:
    """Print how many seconds of what is inside came after the ``fault``, of which a file tells.

    A thread counts them that sleeps for a tenth at a time. What holds up the watcher's thread on a busy machine holds
    it up as well, so that the count is that of an idle one.
    """
    tenths, is_over = 0, threading.Event()

    def count() -> None:
        nonlocal tenths
        while not is_over.wait(0.1):
            tenths += fault.exists()

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        print(f"\nit took {tenths / 10} s", flush=True)


def run(rank: int, size: int, name: str, folder: Path) -> None:
    end, fault = ENDS[name], folder / "fault"

    def act() -> None:
        fault.touch()
        end.act()

    if rank == end.odd:
        end.script(act, folder)
    else:
        with counted(fault):
            end.script(nothing, folder)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICKEST else SLOW) for name in ENDS])
def test_the_others_end_within_ten_seconds_and_say_why(tmp_path: Path, name: str) -> None:
    end = ENDS[name]
    assert watch.CAUGHT_S + 3 * watch.TICK_S < WITHIN_S, "the longest that the watcher waits before it is sure"
    with Group(end.size, run, name, tmp_path, folder=tmp_path, frees_modules=end.size == 3) as group:
        endings = group.endings([rank for rank in range(end.size) if rank != end.odd])
        (tmp_path / "over").touch()
    for ending in endings.values():
        assert ending.status == 1, ending.text
        assert len(ending.errors) == 1, ending.text  # without another that it followed from
        assert re.search(end.said, ending.text, flags=re.MULTILINE), ending.text
        (waited_s,) = re.findall(r"^it took ([\d.]+) s$", ending.text, flags=re.MULTILINE)
        assert float(waited_s) <= WITHIN_S


# -- a slow rank -------------------------------------------------------------------------------------------------------


def be_slow() -> None:
    """Wait until the other rank has warned, and this one has printed where it is."""
    own = Path(os.readlink("/proc/self/fd/2"))
    end = time.monotonic() + LIMIT_S / 2
    while time.monotonic() < end:
        if "in be_slow" in own.read_text() and "has waited" in own.with_name("rank0.txt").read_text():
            break
        time.sleep(0.1)


def be_busy() -> None:
    """Be busy for three seconds in which no other thread of this process runs, as a compiler may be."""
    ctypes.PyDLL(None).sleep(3)


def run_slowly(rank: int, size: int, script: Callable[[Act, Path], None], act: Act, folder: Path) -> None:
    watch.TICK_S, watch.WARN_S, watch.CAUGHT_S = 0.2, 1.5, 0.5
    script(act if rank == 1 else nothing, folder)
    print("trained", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "act", "place"),
    [
        (between_steps, be_slow, "the gather of chunk 0"),
        (partial(at_start, 0), be_busy, "the start of "),
        (partial(at_start, 3), be_busy, "the start of "),
    ],
)
def test_a_slow_rank_is_waited_for_with_a_warning(
    tmp_path: Path, script: Callable[[Act, Path], None], act: Act, place: str
) -> None:
    with Group(2, run_slowly, script, act, tmp_path, folder=tmp_path) as group:
        endings = group.endings(range(2))
    for ending in endings.values():
        assert ending.status == 0, ending.text
        assert ending.text.endswith("trained\n")
    found = re.findall(r"UserWarning: rank 0 has waited \d+ s for (?:rank 1|other ranks) in (.*)", endings[0].text)
    assert len(set(found)) == len(found), "one warning for each wait"
    assert any(each.startswith(place) for each in found), found
    if act is be_slow:
        _, *stacks = endings[1].text.split("Other ranks wait for rank 1, which is here:")  # at its start, too
        assert any(re.search(r"test_endings\.py\", line \d+ in be_slow", stack) for stack in stacks), stacks


# -- the start and the end of a group ----------------------------------------------------------------------------------


def end(rank: int, size: int, own: bool) -> None:
    """Train and end. If ``own`` is true, the group is that of this script and not the one that wrap starts."""
    if own:
        dist.init_process_group("gloo")
    # Python calls atexit's functions in reverse order, so this one looks after wrap's own has ended the group.
    atexit.register(lambda: print(f"there is a group: {dist.is_initialized()}", flush=True))
    train()


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_wrap_ends_a_group_that_it_has_started(tmp_path: Path, own: bool) -> None:
    with Group(2, end, own, folder=tmp_path, frees_modules=True) as group:
        for ending in group.endings(range(2)).values():
            assert ending.status == 0, ending.text
            assert f"there is a group: {own}\n" in ending.text, ending.text


def test_a_launcher_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    announced = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in {**announced, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "CONNECT", timedelta(seconds=0.1))
    with pytest.raises(dist.DistNetworkError):
        joining.start_group()


def test_a_rank_that_was_killed_after_it_had_left_its_address_is_named() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("0", json.dumps(("127.0.0.1", server.getsockname()[1])))
    with pytest.raises(protrain.MisuseError, match="rank 0 has died"):
        Links(1, 3, store)


def test_strangers_are_not_listened_to() -> None:
    store = dist.HashStore()
    links = Links(0, 2, store)
    address = "127.0.0.1", json.loads(store.get("0"))[1]
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\4abcd", b""):
        with socket.create_connection(address) as stranger:
            stranger.sendall(said)
        assert [links.receive(0.2) for _ in range(2)] == [[], []]
    Links(1, 2, store).send(["a rank"])
    heard: list[Any] = []
    while (1, ["a rank"]) not in heard:
        heard += links.receive(1.0)
    assert {rank for rank, _ in heard} == {1}


# -- on GPUs -----------------------------------------------------------------------------------------------------------


def part_on_gpus(rank: int, size: int, name: str) -> None:
    torch.cuda.set_device(rank)
    train(FAULTS[name].act, device="cuda") if rank == 1 else train(device="cuda")


def be_killed_on_gpus(rank: int, size: int, victim: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    between_steps(die if rank == victim else nothing, folder, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["an error in forward", "an error in backward", "a forward", "state_dict", "barrier"])
def test_out_of_step_on_two_gpus(tmp_path: Path, name: str) -> None:
    with Group(2, part_on_gpus, name, folder=tmp_path) as group:
        (ending,) = group.endings([0]).values()
    assert len(ending.errors) == 1, ending.text
    begin, *_ = FAULTS[name].others.split("OTHERS")
    assert ending.errors[0].startswith(f"protrain.common.errors.{begin}rank 0 "), ending.text


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("victim", range(2))
def test_a_rank_is_killed_on_two_gpus(tmp_path: Path, victim: int) -> None:
    with Group(2, be_killed_on_gpus, victim, tmp_path, folder=tmp_path) as group:
        (ending,) = group.endings([1 - victim]).values()
    assert re.search(DIED.format(victim), ending.text, flags=re.MULTILINE), ending.text
