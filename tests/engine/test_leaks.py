"""Leaks: nothing grows from step to step, and dropping the model frees all that it held."""

from __future__ import annotations

import functools
import gc
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.engine.engine import Engine
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning.plan import BlockMode
from tests.engine.harness import CKPT, CKPT_SWAP, NONE, SWAP, Spec, adamw, wrap_under
from tests.engine.true_memory import Batch, train

CPU = torch.device("cpu")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def census(optimizer: ProTrainOptimizer) -> Counter[Any]:
    """How many tensors, objects of each class of ProTrain and finalizers there are, and the bytes of host memory."""
    optimizer.state_dict()  # waits for all updates
    found: Counter[Any] = Counter()
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) or str(type(thing).__module__).startswith("protrain"):
            found[type(thing)] += 1
    found["finalizers"] = len(vars(weakref.finalize)["_registry"])
    found["host bytes"] = optimizer.report().host_bytes
    return found


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "spec",
    [
        Spec("some", "least", (SWAP, CKPT, NONE)),
        Spec("none", "least", (SWAP,)),
        Spec("none", "least", (SWAP,), packed=True),
        Spec("none", "least", (CKPT_SWAP,)),
        Spec("some", "least", (CKPT_SWAP, SWAP), attention=True),
    ],
    ids=str,
)
def test_nothing_grows_from_step_to_step(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], spec: Spec
) -> None:
    model = tiny_model("gpt2")
    model, optimizer = wrap_under(spec, model, adamw(model), tiny_batch(), device=CPU, accumulation=2)
    for step in range(13):
        if step == 3:
            before = census(optimizer)
        train(model, optimizer, tiny_batch(step), backwards=1 + step % 2)
        if step % 5 == 0:
            with torch.no_grad():
                model(**tiny_batch(step))
    assert census(optimizer) - before == Counter()
    assert not math.isnan(float(optimizer.report().step_ms))


class Scaled(nn.Module):
    """A block with tables that are no buffers and outlive every step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), torch.full((width,), 0.5)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.0, x.shape[0])[:, None]
        return x + torch.tanh(self.linear(x) * self.scale * self.table)


@pytest.mark.parametrize("mode", [NONE, CKPT, CKPT_SWAP, SWAP], ids=str)
def test_tables_of_the_model_are_held_by_no_step(mode: BlockMode) -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), *(Scaled(8) for _ in range(3))), (torch.randn(4, 8),)
    wrapped, optimizer = wrap_under(Spec("some", "least", (mode,)), model, adamw(model), batch, device=CPU)

    def after_steps(count: int) -> Counter[Any]:
        for _ in range(count):
            wrapped(*batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return census(optimizer)

    before = after_steps(2)
    assert after_steps(3) == before
    ledger: Any = optimizer._engine.ledger
    assert ledger.held_bytes == 0


def test_forwards_without_a_backward_leave_nothing(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch]
) -> None:
    for modes in ((SWAP, CKPT, NONE), (CKPT_SWAP,)):
        model = tiny_model("gpt2")
        spec = Spec("none", "least", modes)
        model, optimizer = wrap_under(spec, model, adamw(model), tiny_batch(), device=CPU)
        train(model, optimizer, tiny_batch())
        before = census(optimizer)
        for _ in range(3):
            model(**tiny_batch())
        train(model, optimizer, tiny_batch())
        assert census(optimizer) - before == Counter()


# -- dropping ----------------------------------------------------------------------------------------------------------


def _wait(event: threading.Event) -> None:
    event.wait()


def _fail(engine: Engine) -> None:
    raise ArithmeticError("the error refers to this frame, and the frame to the engine")


@pytest.mark.parametrize("failed", [False, True])
def test_dropping_model_and_optimizer_frees_everything(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], failed: bool
) -> None:
    model = tiny_model("gpt2")
    spec = Spec("some", "least", (SWAP, CKPT, NONE), speculate=True)
    model, optimizer = wrap_under(spec, model, adamw(model), tiny_batch(), device=CPU)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    train(model, optimizer, tiny_batch())
    scheduler.step()
    engine = optimizer._engine
    going_on = threading.Event()
    if failed:
        engine.updates.wait()
        job = engine.updates.worker.submit(functools.partial(_fail, engine))
        with pytest.raises(ArithmeticError):
            job.wait()
        del job
    threads: list[threading.Thread] = [engine.updates.worker._thread]
    things = (engine, engine.memory.arena._segments[0], model, *engine.buffers.buffers, *engine.chunks)
    gone = [weakref.ref(thing) for thing in things]
    chunk = next(chunk for chunk in engine.chunks if not chunk.persistent)
    engine.updates.worker.submit(functools.partial(_wait, going_on))
    model(**tiny_batch()).loss.backward()
    optimizer.step()  # its updates come after that wait
    assert chunk.update is not None
    assert not chunk.update.done
    del model, optimizer, scheduler, engine, chunk, things
    threading.Timer(0.2, going_on.set).start()
    gc.collect()  # waits for the updates and frees everything at once
    assert [reference() for reference in gone] == [None] * len(gone)
    threads[0].join(timeout=10)
    assert not threads[0].is_alive()
