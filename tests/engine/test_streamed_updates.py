"""Chunks in host memory that the device updates, beside the host: the bits of the plain loop, whoever did it.

Which chunks the device takes depends on how fast both are. Here it is forced; test_sharing.py has the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.host_updates import Streamer, Window
from protrain.engine.updates.updates import Updates
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning.sharing import Waiting
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
    Batch,
    Loop,
    Spec,
    Trainer,
    adamw,
    assert_same,
    default_loss,
    make_plan,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain

SPEC = Spec("none", "least", (NONE, CKPT), small=True, stream=True)
STEPS = 4
Run = Callable[[nn.Module, Any, list[Batch]], Any]


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device takes every update that it can do, before the host begins any."""

    queue = Updates._queue

    def device_first(updates: Updates, *arguments: Any) -> None:
        done = threading.Event()
        if updates.streamer is not None:
            updates.worker.submit(functools.partial(_wait_for, done))
        queue(updates, *arguments)
        if updates.streamer is not None:
            updates.streamer.worker.submit(done.set)

    monkeypatch.setattr("protrain.engine.updates.host_updates.next_for_gpu", first_possible)
    monkeypatch.setattr(Updates, "_queue", device_first)


def _wait_for(event: threading.Event) -> None:
    assert event.wait(20)


def first_possible(waiting: Sequence[Waiting], *_: float) -> int | None:
    return next((index for index, update in enumerate(waiting) if update.device_ms < inf), None)


def trained(
    run: Run,
    device: torch.device,
    *,
    spec: Spec = SPEC,
    dtype: torch.dtype = torch.bfloat16,
    batches: int = STEPS,
    **options: Any,
) -> ProTrainOptimizer:
    """What ``run`` trained, whose bits are those of the plain loop."""
    data = residual.batches(batches)
    model, again = residual.make(), residual.make()
    plain, trainer = prepare_plain(model, adamw(model), device=device, dtype=dtype)
    wrapped, optimizer = wrap_under(spec, again, adamw(again), data[0], device=device, dtype=dtype, **options)
    torch.manual_seed(1)
    expected = run(plain, trainer, data)
    torch.manual_seed(1)
    assert run(wrapped, optimizer, data) == expected
    assert_same(states(wrapped, optimizer), states(plain, trainer))
    assert optimizer.plan.stream
    return optimizer


def looping(**options: Any) -> Run:
    return lambda model, optimizer, data: Loop(**options).run(model, optimizer, data)


def check_streamed(optimizer: ProTrainOptimizer, *, steps: int) -> None:
    """The device made every update of every chunk in host memory that counted."""
    n_away = optimizer.plan.n_chunks - optimizer.plan.n_persist
    assert n_away > 1
    assert optimizer.report().streamed_updates == steps * n_away


@pytest.mark.parametrize(
    ("dtype", "max_norm"),
    [(torch.bfloat16, None), (torch.bfloat16, 0.05), (torch.float16, 0.05), (torch.float32, None)],
    ids=str,
)
def test_bits(device: torch.device, dtype: torch.dtype, max_norm: float | None) -> None:
    optimizer = trained(looping(max_norm=max_norm), device, dtype=dtype)
    check_streamed(optimizer, steps=STEPS - optimizer.skipped_steps)


def test_skipped_steps_change_nothing(device: torch.device) -> None:
    def overflowing(model: nn.Module, batch: Batch) -> torch.Tensor:
        return default_loss(model, batch) * 32

    n_steps = 6  # the scale is halved in each of the first ones
    optimizer = trained(looping(max_norm=0.5, loss=overflowing), device, dtype=torch.float16, batches=n_steps)
    assert 0 < optimizer.skipped_steps < n_steps


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("no_sync", [False, True], ids=["backwards", "no-sync"])
def test_sums_of_several_backwards(device: torch.device, no_sync: bool, sums: bool) -> None:
    spec = dataclasses.replace(SPEC, sums=sums)
    run = looping(max_norm=0.5, accumulate=2, no_sync=no_sync)
    optimizer = trained(run, device, spec=spec, accumulation=2)
    check_streamed(optimizer, steps=STEPS // 2)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_after_a_backward_with_updates_inside(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    monkeypatch.setattr(Window, "is_closed", lambda _: True)  # as if the host had begun none in backward
    run = looping(accumulate=accumulate, no_sync=accumulate > 1)
    optimizer = trained(run, device, step_during_backward=True, accumulation=accumulate)
    check_streamed(optimizer, steps=STEPS // accumulate)


@pytest.mark.parametrize("weights", [False, True], ids=["states", "weights"])
def test_beside_persistent_chunks_and_speculative_updates_that_are_redone(device: torch.device, weights: bool) -> None:
    spec = Spec("some", "middle", (SWAP, CKPT, NONE), small=True, speculate=True, weights=weights, stream=True)
    optimizer = trained(looping(max_norm=0.05), device, spec=spec)
    assert optimizer.plan.n_persist > 0 < optimizer.plan.n_speculate
    check_streamed(optimizer, steps=STEPS)


@pytest.mark.parametrize("weights", [False, True], ids=["states", "weights"])
def test_what_can_be_committed_is_not_streamed(device: torch.device, weights: bool) -> None:
    spec = Spec("none", "least", (CKPT,), small=True, speculate=True, weights=weights, stream=True)

    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> list[float]:
        losses = []
        for batch in data:
            loss = default_loss(model, batch)
            loss.backward()
            if isinstance(optimizer, ProTrainOptimizer):
                optimizer.state_dict()  # waits for the speculative updates
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    optimizer = trained(run, device, spec=spec)
    report, plan = optimizer.report(), optimizer.plan
    assert (report.speculative_updates, report.redone_updates) == (STEPS * plan.n_speculate, 0)
    assert report.streamed_updates == STEPS * (plan.n_chunks - plan.n_speculate) > 0


def test_states_are_read_after_every_update(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Streamer.update

    def late(*args: Any) -> None:
        time.sleep(0.02)
        update(*args)

    monkeypatch.setattr(Streamer, "update", late)

    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> list[float]:
        values = []
        for batch in data:
            default_loss(model, batch).backward()
            values.append(float(optimizer.clip_grad_norm_(0.5)))
            optimizer.step()
            values += [float(value.double().sum()) for _, value in sorted(states(model, optimizer).items())]
            optimizer.zero_grad()
        return values

    trained(run, device)


@pytest.mark.parametrize("waits", ["forward", "state_dict"])
def test_an_error_is_raised_in_whoever_waits(device: torch.device, monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    data, model = residual.batches(1), residual.make()
    wrapped, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    monkeypatch.setattr(Chunk, "step_streamed", _fail)
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: wrapped(*data[0]),
        "state_dict": optimizer.state_dict,
    }
    with pytest.raises(ArithmeticError, match="the streamed update failed"):
        ways[waits]()


def _fail(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the streamed update failed")


def test_threads_end_with_the_model(device: torch.device) -> None:
    data, model, others = residual.batches(1), residual.make(), set(threading.enumerate())
    wrapped, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    threads = {thread for thread in threading.enumerate() if thread not in others}
    assert {"protrain-host-worker", "protrain-stream-worker"} <= {thread.name for thread in threads}
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    del model, wrapped, optimizer
    deadline = time.monotonic() + 10  # autograd's thread of a GPU holds the backward until it has waited for us
    while gc.collect() >= 0 and gone() is not None and time.monotonic() < deadline:  # what it lets go may be a cycle
        time.sleep(0.01)
    assert gone() is None
    assert not any(thread.is_alive() for thread in threads if thread.name.startswith("protrain-"))


def test_device_memory_is_as_planned(device: torch.device) -> None:
    data, model = residual.batches(1), residual.make()
    profile = protrain.profile(model, data[0], optimizer=adamw(model), device=device, dtype=torch.bfloat16)
    streaming, without = (
        make_plan(dataclasses.replace(SPEC, stream=stream), profile, device) for stream in (True, False)
    )
    reports = []
    for spec in (SPEC, dataclasses.replace(SPEC, stream=False)):
        model = residual.make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
        Loop().run(wrapped, optimizer, data)
        reports.append(optimizer.report().device_bytes)
    staging = 2 * 18 * streaming.chunk_elements
    assert streaming.device_bytes - without.device_bytes == staging
    if device.type == "cpu":  # a GPU's allocator rounds
        assert reports[0] - reports[1] == staging
