"""The engine's parts on their own: arena, host worker, loss scale, simulated ledger."""

from __future__ import annotations

import functools
import gc
import mmap
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from protrain.common.errors import BudgetError
from protrain.engine.gradients.clipping import LossScale
from protrain.engine.states import chunks
from protrain.engine.states.arena import Arena
from protrain.engine.updates.host_updates import HostUpdate, HostUpdates, Rate
from protrain.engine.updates.worker import HostWorker, Job
from protrain.engine.weights.views import SimulatedLedger
from protrain_kernels import adam_scalars


def assert_true(value: bool) -> None:
    assert value


# -- arena -------------------------------------------------------------------------------------------------------------


def test_the_arena_is_exact_to_the_page() -> None:
    page, arena = mmap.PAGESIZE, Arena(torch.device("cpu"))
    arena.reserve(3 * page)
    assert (arena.total_bytes, arena.free_bytes) == (3 * page, 3 * page)
    first, second = arena.take(1, torch.float32), arena.take(page // 2 + 1, torch.int16)
    assert (arena.total_bytes, arena.free_bytes) == (3 * page, 0)
    third = arena.take(page, torch.uint8)
    assert arena.total_bytes == 4 * page, "what does not fit is mapped, and no more"
    pieces = [first, second, third]
    assert [piece.numel() for piece in pieces] == [1, page // 2 + 1, page]
    for value, piece in enumerate(pieces):
        assert piece.data_ptr() % page == 0
        assert not piece.any()
        piece.fill_(value + 1)
    assert all(piece.eq(value + 1).all() for value, piece in enumerate(pieces)), "pieces overlap"
    arena.reserve(0)
    assert arena.total_bytes == 4 * page


def test_memory_that_the_system_does_not_have_is_an_error() -> None:
    arena = Arena(torch.device("cpu"))
    with pytest.raises(MemoryError, match=r"cannot map 1024 TiB of host memory"):
        arena.reserve(1 << 50)
    assert arena.total_bytes == 0
    assert arena.take(4, torch.float32).eq(0).all()


# -- host worker -------------------------------------------------------------------------------------------------------


def test_jobs_run_in_order_on_one_thread() -> None:
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    done: list[tuple[int, int]] = []

    def note(index: int) -> None:
        done.append((index, threading.get_ident()))

    for index in range(50):
        worker.submit(functools.partial(note, index))
    worker.drain()
    assert [index for index, _ in done] == list(range(50))
    assert len({thread for _, thread in done}) == 1
    assert done[0][1] != threading.get_ident()
    worker.submit(lambda: done.append((50, 0)))
    thread = worker._thread
    del worker
    assert done[-1] == (50, 0), "what is queued comes first"
    assert not thread.is_alive()


def test_an_update_is_sliced_until_no_commit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_SLICE_ELEMENTS", 256)
    first, second = (
        adam_scalars(lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1, decoupled=True) for lr in (1, 2)
    )
    left = iter((True, True, True, False))
    pieces = [(slice(128, 512), first), (slice(640, 1664), second)]
    found = list(chunks._sliced(pieces, lambda: next(left)))
    assert found == [
        (slice(128, 384), first),
        (slice(384, 512), first),
        (slice(640, 896), second),
        (slice(896, 1664), second),
    ]


def _commits(count: int, link: list[bool]) -> tuple[HostUpdates, list[Job], list[int]]:
    """Commits of ``count`` updates that are done. ``link`` has the answers to whether the link is idle."""
    taken: list[int] = []
    jobs = [Job(functools.partial(taken.append, index)) for index in range(count)]
    host = HostUpdates(threads=1, rate=Rate(0.0), link_is_idle=lambda: link.pop(0))
    host.begin_step([cast(HostUpdate, SimpleNamespace(job=job, can_commit=lambda: True)) for job in jobs], None, 1.0)
    return host, jobs, taken


def test_between_slices_as_many_commits_run_as_the_link_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no commit is left the rest of the update is one slice."""
    monkeypatch.setattr(chunks, "_SLICE_ELEMENTS", 256)
    host, _, taken = _commits(3, [False, True, False, True, True])
    whole = (
        slice(0, 2048),
        adam_scalars(lr=1.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1, decoupled=True),
    )
    seen = [(part.start, part.stop, len(taken)) for part, _ in chunks._sliced([whole], host.run_commits)]
    assert seen == [(0, 256, 0), (256, 512, 1), (512, 2048, 3)]


def test_jobs_that_have_had_their_turn_are_not_run_again() -> None:
    host, jobs, taken = _commits(3, [False, False])
    assert host.run_commits()
    for job in jobs[:2]:
        job.run()
    assert host.run_commits(), "the third is left"
    jobs[2].run()
    assert not host.run_commits(), "without a look at the link"
    assert taken == [0, 1, 2]


def test_a_job_that_is_run_ahead_is_done_once() -> None:
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    done: list[str] = []
    later = worker.job(lambda: done.append("later"))

    def first() -> None:
        later.run()
        done.append("first")
        own.run()  # it runs already

    own = worker.job(first)
    worker.queue(own)
    worker.queue(later)
    worker.drain()
    assert done == ["later", "first"]
    assert later.done
    assert own.done


def fail() -> None:
    raise ArithmeticError("a failing job")


def test_an_error_reaches_whoever_waits_and_no_other_job() -> None:
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    followed: list[str] = []
    gate = threading.Event()
    blocked = worker.submit(lambda: assert_true(gate.wait(20)))
    failing, fine = worker.submit(fail), worker.submit(lambda: None)
    failing.when_done(lambda: followed.append("after a failure"))
    fine.when_done(lambda: followed.append("later"))
    gate.set()
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="a failing job"):
            failing.wait()
    blocked.wait()
    worker.drain()
    assert followed == ["later"]
    fine.when_done(lambda: followed.append("at once"))
    assert followed == ["later", "at once"]


def test_an_error_of_a_follower_does_not_end_the_thread() -> None:
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    gate = threading.Event()
    job = worker.submit(lambda: assert_true(gate.wait(20)))
    job.when_done(fail)
    gate.set()
    worker.drain()
    with pytest.raises(ArithmeticError, match="a failing job"):
        job.wait()
    assert worker._thread.is_alive()


def test_the_thread_ends_with_its_owner() -> None:
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    thread, gone = worker._thread, weakref.ref(worker)
    worker.drain()
    del worker
    assert gone() is None
    assert not thread.is_alive()


def test_a_worker_that_collects_another_does_not_wait_for_it() -> None:
    host, streams = (HostWorker(threads=1, device=torch.device("cpu")) for _ in range(2))
    owner = SimpleNamespace(host=host, streams=streams)
    del host, streams
    owner.itself = owner  # so that the collector ends both, on the thread that it happens to run on
    threads, gate = (owner.host._thread, owner.streams._thread), threading.Event()

    def collect() -> None:
        assert gate.wait(20)
        gc.collect()

    collecting = owner.host.submit(collect)
    later = owner.host.submit(lambda: None)
    waiting = owner.streams.submit(later.wait)
    gc.disable()  # here, where it would wait for the gate
    del owner
    gate.set()
    gc.enable()
    for job in (collecting, later, waiting):
        assert job._done.wait(20)
        job.wait()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_the_collector_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run where its caller holds what a queued job waits for, as one kernel at a time compiles."""
    monkeypatch.setattr("protrain.engine.updates.worker._JOIN_S", 0.1)
    compiling = threading.Lock()
    worker = HostWorker(threads=1, device=torch.device("cpu"))
    thread, job = worker._thread, worker.submit(lambda: assert_true(compiling.acquire(timeout=20)))
    with compiling:
        del worker
        assert not job.done
    job.wait()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.slow
def test_the_interpreters_exit_waits_for_queued_work(tmp_path: Path) -> None:
    """Also for that of a worker that nobody refers to any more."""
    program = f"""
import pathlib, time, torch
from protrain.engine.updates import worker as module
from protrain.engine.updates.worker import HostWorker
module._PATIENCE_S = 0.0
kept, dropped = (HostWorker(threads=1, device=torch.device("cpu")) for _ in range(2))
for worker, file in (kept, {str(tmp_path / "kept")!r}), (dropped, {str(tmp_path / "dropped")!r}):
    worker.submit(lambda: time.sleep(0.3))
    worker.submit(lambda file=file: pathlib.Path(file).touch())
del worker, dropped
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "dropped"}


@pytest.mark.slow
def test_work_after_the_end_of_all_threads_is_done_at_once(tmp_path: Path) -> None:
    """A handler of the user's for the interpreter's exit may come after ours, and save a checkpoint."""
    program = f"""
import atexit, pathlib, torch
atexit.register(lambda: worker.submit(lambda: pathlib.Path({str(tmp_path / "done")!r}).touch()).wait())
from protrain.engine.updates.worker import HostWorker
worker = HostWorker(threads=1, device=torch.device("cpu"))
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    assert (tmp_path / "done").exists()


# -- loss scale --------------------------------------------------------------------------------------------------------


def test_the_loss_scale_grows_and_halves_within_its_bounds() -> None:
    scale = LossScale()
    with scale.for_backward() as factor:
        assert factor == 2.0**16
    assert all(scale.update(True) for _ in range(1999))
    assert scale.scale == 2.0**16
    assert scale.update(True)
    assert (scale.scale, scale.used) == (2.0**17, 2.0**16), "what was used is not what comes next"
    with scale.for_backward() as factor:
        assert factor == 2.0**17
    assert not scale.update(False)
    assert (scale.scale, scale.used, scale.finite_steps, scale.skipped) == (2.0**16, 2.0**17, 0, 1)
    for _ in range(40):
        scale.update(False)
    assert scale.scale == 2.0**-24
    scale.load({"scale": 2.0**24, "finite_steps": 1999, "skipped": 3})
    scale.update(True)
    assert scale.scale == 2.0**24
    other = LossScale()
    other.load(scale.state())
    assert other.state() == scale.state()


# -- ledger ------------------------------------------------------------------------------------------------------------


def test_the_ledger_counts_each_storage_while_it_is_held() -> None:
    ledger = SimulatedLedger(budget_bytes=2000, fixed_bytes=100)
    tensor = torch.zeros(100)
    views: list[Tensor] = [tensor[:10], tensor.view(10, 10), tensor.detach()]
    for view in views:
        ledger.hold(view)
    assert ledger.held_bytes == 400
    del view, tensor
    views.pop(0)
    assert ledger.held_bytes == 400
    views.clear()
    assert ledger.held_bytes == 0
    assert ledger.peak_bytes == 500


def test_the_ledger_forgets_an_excess_once_it_is_gone() -> None:
    ledger = SimulatedLedger(budget_bytes=1000, fixed_bytes=100)
    small, large = torch.zeros(100), torch.zeros(200)
    ledger.hold(small)
    with pytest.raises(BudgetError, match=r"100 B fixed and 1.17 KiB of activations held exceed device_memory=1000 B"):
        ledger.hold(large)
    del large
    ledger.hold(torch.zeros(100))
    assert (ledger.held_bytes, ledger.peak_bytes) == (400, 900)


def test_the_ledger_counts_nothing_of_what_is_there_for_good() -> None:
    buffer, other = torch.zeros(100), torch.zeros(100)
    ledger = SimulatedLedger(budget_bytes=1000, fixed_bytes=600, fixed=[buffer])
    ledger.hold(buffer[:50])
    assert ledger.held_bytes == 0
    ledger.hold(other)
    assert (ledger.held_bytes, ledger.peak_bytes) == (400, 1000)
