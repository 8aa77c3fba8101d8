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
from tests.engine.harness import Spec, adamw, wrap_under
from tests.engine.true_memory import Batch, train


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
    found: Counter[Any] = Counter({"host bytes": optimizer.report().host_bytes})  # the first report makes a prediction
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) or str(type(thing).__module__).startswith("protrain"):
            found[type(thing)] += 1
    found["finalizers"] = len(vars(weakref.finalize)["_registry"])
    return found


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "spec",
    [
        Spec("some", "least", "scn"),
        Spec("none", "least", "s"),
        Spec("none", "least", "s", packed=True),
        Spec("none", "least", "i"),
        Spec("some", "least", "is", attention=True),
    ],
    ids=str,
)
def test_nothing_grows_from_step_to_step(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], spec: Spec
) -> None:
    model = tiny_model("gpt2")
    model, optimizer = wrap_under(spec, model, adamw(model), tiny_batch(), accumulation=2)
    for step in range(13):
        if step == 3:
            before = census(optimizer)
        train(model, optimizer, tiny_batch(step), backwards=1 + step % 2)
        if step % 5 == 0:
            with torch.no_grad():
                model(**tiny_batch(step))
    assert census(optimizer) - before == Counter()
    assert not math.isnan(float(optimizer.report().step_ms))


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
    spec = Spec("some", "least", "scn", speculate=True)
    model, optimizer = wrap_under(spec, model, adamw(model), tiny_batch())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    train(model, optimizer, tiny_batch())
    scheduler.step()
    engine = optimizer._engine
    going_on = threading.Event()
    if failed:
        engine.updates.wait()
        job = engine.updates.worker.submit(functools.partial(_fail, engine))
        with pytest.raises(ArithmeticError):
            job.result()
        del job
    thread = engine.updates.worker._thread
    things = (engine, engine.memory.arena._segments[0], model, *engine.buffers.buffers, *engine.chunks)
    gone = [weakref.ref(thing) for thing in things]
    chunk = next(chunk for chunk in engine.chunks if not chunk.persistent)
    engine.updates.worker.submit(functools.partial(_wait, going_on))
    model(**tiny_batch()).loss.backward()
    optimizer.step()  # its updates come after that wait
    assert chunk.update is not None
    assert not chunk.update.done()
    del model, optimizer, scheduler, engine, chunk, things
    threading.Timer(0.2, going_on.set).start()
    gc.collect()  # waits for the updates and frees everything at once
    assert [reference() for reference in gone] == [None] * len(gone)
    thread.join()
