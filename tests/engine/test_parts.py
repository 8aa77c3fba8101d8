"""The engine's parts on their own: arena, host worker, loss scale."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from protrain.engine.gradients.clipping import LossScale
from protrain.engine.states.arena import Arena
from protrain.engine.updates.worker import HostWorker


def assert_true(value: bool) -> None:
    assert value


# -- arena -------------------------------------------------------------------------------------------------------------


def test_memory_that_the_system_does_not_have_is_an_error() -> None:
    arena = Arena(torch.device("cpu"))
    with pytest.raises(MemoryError, match=r"cannot map 1024 TiB of host memory"):
        arena.reserve(1 << 50)
    assert arena.total_bytes == 0
    assert arena.take(4, torch.float32).eq(0).all()


# -- host worker -------------------------------------------------------------------------------------------------------


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
    for _ in range(1999):
        scale.note_step()
    assert scale.scale == 2.0**16
    scale.note_step()
    assert (scale.scale, scale.used) == (2.0**17, 2.0**16), "what was used is not what comes next"
    with scale.for_backward() as factor:
        assert factor == 2.0**17
    scale.note_skipped()
    assert (scale.scale, scale.used, scale.finite_steps, scale.skipped) == (2.0**16, 2.0**17, 0, 1)
    for _ in range(40):
        scale.note_skipped()
    assert scale.scale == 2.0**-24
    with pytest.warns(UserWarning, match="42 steps were skipped.*train in bfloat16"):
        scale.warn_of_smallest()
    scale.load({"scale": 2.0**24, "finite_steps": 1999, "skipped": 3})
    scale.note_step()
    assert scale.scale == 2.0**24
    other = LossScale()
    other.load(scale.state())
    assert other.state() == scale.state()


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
