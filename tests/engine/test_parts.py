"""The engine's parts on their own: arena, host worker, loss scale, pinned memory."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from protrain.engine.gradients.clipping import LossScale
from protrain.engine.states.arena import Arena
from tests.engine import residual
from tests.engine.harness import Spec, adamw, default_loss, wrap_under

# -- arena -------------------------------------------------------------------------------------------------------------


def test_memory_that_the_system_does_not_have_is_an_error() -> None:
    arena = Arena(torch.device("cpu"))
    with pytest.raises(MemoryError, match=r"cannot map 1024 TiB of host memory"):
        arena.reserve(1 << 50)
    assert arena.total_bytes == 0
    assert arena.take(4, torch.float32).eq(0).all()


# -- host worker -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_interpreters_exit_waits_for_queued_work(tmp_path: Path) -> None:
    """Also for a worker that nobody refers to any more, and for a handler of the user's that comes after ours."""
    program = f"""
import atexit, pathlib, time, torch
folder = pathlib.Path({str(tmp_path)!r})
atexit.register(lambda: kept.submit((folder / "after all threads").touch).result())
from protrain.engine.updates import worker as module
module._PATIENCE_S = 0.0
kept, dropped = (module.HostWorker(threads=1, device=torch.device("cpu")) for _ in range(2))
for worker, name in (kept, "kept"), (dropped, "dropped"):
    worker.submit(lambda: time.sleep(0.3))
    worker.submit((folder / name).touch)
del worker, dropped
"""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "dropped", "after all threads"}


# -- loss scale --------------------------------------------------------------------------------------------------------


def test_the_loss_scale_grows_and_halves_within_its_bounds() -> None:
    scale = LossScale()
    for _ in range(2000):
        scale.count_step()
    with scale.for_backward() as factor:
        assert factor == 2.0**17
    for _ in range(42):
        scale.count_skipped()
    assert scale.state() == {"scale": 2.0**-24, "finite_steps": 0, "skipped": 42}
    with pytest.warns(UserWarning, match="train in bfloat16"):
        scale.warn_of_smallest()
    scale.load({"scale": 2.0**24, "finite_steps": 1999, "skipped": 3})
    scale.count_step()
    assert scale.scale == 2.0**24


# -- pinned memory -----------------------------------------------------------------------------------------------------


CUDA = torch.device("cuda")
SPEC = Spec("none", "all", "n")


class Driver:
    """Stands for the CUDA runtime's: knows what is registered, and what was done in which order."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.done: list[str] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.registered[address] = size_bytes
        return flags

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        self.done.append("unregister")
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    gc.collect()  # what the real one has pinned it unpins
    one = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: one)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: one.done.append(f"synchronize {device}"))
    yield one
    gc.collect()  # what is pinned by this driver is unpinned by it


def test_memory_is_unpinned_when_the_last_tensor_on_it_is_gone(driver: Driver) -> None:
    arena = Arena(CUDA)
    arena.reserve(2**20)
    first, second = arena.take(100, torch.float32), arena.take(100, torch.bfloat16)
    unpinned = arena.take(100, torch.int16, transferred=False)
    addresses = {first.data_ptr(), second.data_ptr()}
    assert set(driver.registered) == addresses
    part = second[50:]
    del arena, first, second, unpinned
    gc.collect()
    assert set(driver.registered) == addresses, "somebody may still copy from what is left"
    assert part.eq(0).all()
    assert driver.done == []
    del part
    assert driver.registered == {}
    assert driver.done == ["synchronize cuda", "unregister", "unregister"]


def test_what_the_driver_refuses_is_not_taken_for_pinned(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(CUDA)
    kept = arena.take(100, torch.float32)
    monkeypatch.setattr(driver, "cudaHostRegister", lambda *_: 2)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch, "ones", lambda _, device: asked.append(device))
    with pytest.warns(UserWarning, match="refuses to pin host memory") as warned:
        refused = [arena.take(2000, torch.float32) for _ in range(2)]
    assert len(warned) == 1
    assert not arena.all_pinned
    assert all(piece.eq(0).all() for piece in refused)
    assert asked == [CUDA, CUDA], "the driver keeps an error until somebody asks"
    assert set(driver.registered) == {kept.data_ptr()}
    del arena, kept, refused
    assert driver.done == ["synchronize cuda", "unregister"]


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_trains_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    data, results = residual.batches(3), []
    for refused in (False, True):
        if refused:
            monkeypatch.setattr("protrain.common.host_memory.register", lambda memory, device: 2)
        model = residual.make()
        with pytest.warns(UserWarning, match="refuses to pin") if refused else nullcontext():
            wrapped, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=CUDA, dtype=torch.bfloat16)
        for batch in data:
            default_loss(wrapped, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([value.cpu() for value in wrapped.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
