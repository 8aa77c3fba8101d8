"""Chunks in host memory that the device updates, beside the host: the bits of the plain loop, whoever did it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

from protrain.engine.report import Report
from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.host_updates import HostOptimizer, Rate, Streamer, Window
from protrain.engine.updates.updates import Updates
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning.sharing import Waiting, next_for_gpu
from tests.engine import residual
from tests.engine.harness import Batch, Loop, Run, Spec, check_equal_to_plain, default_loss

SPEC = Spec("none", "least", "nc", small=True, stream=True)
STEPS = 4


def first_possible(waiting: Sequence[Waiting], *_: float) -> int | None:
    return next((index for index, update in enumerate(waiting) if update.device_ms < inf), None)


def trained(
    run: Run, device: torch.device, *, dtype: torch.dtype = torch.bfloat16, batches: int = STEPS, **options: Any
) -> ProTrainOptimizer:
    """What ``run`` trained, whose bits are those of the plain loop."""
    how: dict[str, Any] = {"run": run, "device": device, "dtype": dtype, "specs": [SPEC], **options}
    (optimizer,) = check_equal_to_plain(residual.make, residual.batches(batches), **how)
    assert optimizer.plan.stream
    return optimizer


def take_turns(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., int | None]) -> None:
    """Let the host begin an update when the device's thread has chosen one, or waits for the host, or is done.

    Otherwise the host may be done with all of them before the other thread looks.
    """
    turn, chosen, over = threading.Condition(), False, False

    def change(*, has_chosen: bool, is_over: bool) -> None:
        nonlocal chosen, over
        with turn:
            chosen, over = has_chosen, is_over
            turn.notify_all()

    def choosing(*args: Any) -> int | None:
        index = choose(*args)
        change(has_chosen=True, is_over=index is None)  # it may wait for an update later than the one that is next
        return index

    def queueing(*args: Any) -> None:
        change(has_chosen=False, is_over=False)
        queue(*args)

    def sharing(*args: Any) -> None:
        share(*args)
        change(has_chosen=False, is_over=True)

    def updating(*args: Any) -> None:
        nonlocal chosen
        with turn:
            assert turn.wait_for(lambda: chosen or over, 240)
            chosen = False
        update(*args)

    queue, share, update = Updates._queue, Streamer._share, HostOptimizer.update
    monkeypatch.setattr("protrain.engine.updates.host_updates.next_for_gpu", choosing)
    monkeypatch.setattr(Updates, "_queue", queueing)
    monkeypatch.setattr(Streamer, "_share", sharing)
    monkeypatch.setattr(HostOptimizer, "update", updating)


@pytest.mark.parametrize(
    ("dtype", "loop", "inside"),
    [
        (torch.bfloat16, Loop(max_norm=0.5), False),
        (torch.float16, Loop(max_norm=0.05), False),
        (torch.float32, Loop(), False),
        (torch.bfloat16, Loop(), True),
        (torch.bfloat16, Loop(accumulate=2, no_sync=True), True),
    ],
    ids=("bf16", "fp16", "fp32", "inside", "accumulated"),
)
def test_whoever_does_it_the_bits_are_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, loop: Loop, inside: bool
) -> None:
    """The device takes an update at random, or waits until the host is done with one."""
    choice = random.Random(0)

    def at_random(waiting: Sequence[Waiting], *_: float) -> int | None:
        possible = [index for index, update in enumerate(waiting) if update.device_ms < inf]
        return choice.choice([None, *possible])

    take_turns(monkeypatch, at_random)
    if inside:
        monkeypatch.setattr(Window, "is_closed", lambda _: True)  # as if the host had begun none in backward
    steps = 200 if device.type == "cuda" else 12
    options: dict[str, Any] = {"step_during_backward": inside, "accumulation": loop.accumulate}
    optimizer = trained(loop.run, device, dtype=dtype, batches=steps * loop.accumulate, **options)
    steps -= optimizer.skipped_steps
    n_updates = steps * (optimizer.plan.n_chunks - optimizer.plan.n_persist)
    assert steps // 5 < optimizer.report().streamed_updates < n_updates - steps // 5


@pytest.mark.parametrize("waits", ["forward", "state_dict"])
def test_an_error_is_raised_in_whoever_waits(device: torch.device, monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    take_turns(monkeypatch, first_possible)
    wrapped, optimizer = residual.wrapped(SPEC, device=device, dtype=torch.bfloat16)
    monkeypatch.setattr(Chunk, "adam_streamed", _fail)
    (batch,) = residual.batches(1)
    default_loss(wrapped, batch).backward()
    optimizer.step()
    ways: dict[str, Callable[[], Any]] = {"forward": lambda: wrapped(*batch), "state_dict": optimizer.state_dict}
    with pytest.raises(ArithmeticError, match="the streamed update failed"):
        ways[waits]()


def _fail(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the streamed update failed")


def test_a_second_step_by_the_same_gradients_waits_for_the_first(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host could otherwise begin to update a chunk that the device still updates."""
    at_work: list[Chunk] = []
    met: list[int] = []

    def alone(update: Callable[..., None]) -> Callable[..., None]:
        def watched(chunk: Chunk, *args: Any, **options: Any) -> None:
            if chunk in at_work:
                met.append(chunk.index)
            at_work.append(chunk)
            time.sleep(0.02)
            update(chunk, *args, **options)
            at_work.remove(chunk)

        return watched

    def twice(model: nn.Module, optimizer: Any, data: Sequence[Batch]) -> None:
        for batch in data:
            default_loss(model, batch).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()

    for name in ("adam", "adam_streamed"):
        monkeypatch.setattr(Chunk, name, alone(getattr(Chunk, name)))
    monkeypatch.setattr("protrain.engine.updates.host_updates.next_for_gpu", first_possible)
    trained(twice, device)
    assert met == []


def trained_beside_a_late_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, *, needed_ms: float = 0.0
) -> Report:
    """The report of four steps. At first the host is taken for slow, and the device for quick.

    ``needed_ms`` is when the forward needs each chunk.
    """
    wrapped, optimizer = residual.wrapped(SPEC, device=device, dtype=torch.bfloat16)
    streamer = optimizer._engine.updates.streamer
    assert streamer is not None
    sharing = streamer._sharing._replace(needed_ms=(needed_ms,) * optimizer.plan.n_chunks)
    monkeypatch.setattr(streamer, "_sharing", sharing)
    streamer.host_rate.gparams, streamer.rate.gparams = 1e-6, 1.0
    Loop(max_norm=1e9).run(wrapped, optimizer, residual.batches(4))
    optimizer.state_dict()  # waits for all updates
    return optimizer.report()


def test_a_host_that_is_late_gets_help_and_one_in_time_gets_none(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(monkeypatch, next_for_gpu)
    monkeypatch.setattr(Rate, "timing", lambda *_: nullcontext())
    assert trained_beside_a_late_host(device, monkeypatch).streamed_updates > 0
    assert trained_beside_a_late_host(device, monkeypatch, needed_ms=1e9).streamed_updates == 0
