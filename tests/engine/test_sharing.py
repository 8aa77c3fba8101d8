"""Who updates a chunk in host memory is chosen as a step runs, and no bit depends on it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
import torch

from protrain.engine.report import Report
from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.host_updates import HostUpdates, Rate, Window
from protrain.planning.sharing import Waiting
from protrain_kernels import adam_scalars
from tests.engine import residual
from tests.engine.harness import CKPT, NONE, Loop, Spec, adamw, wrap_under
from tests.engine.test_streamed_updates import SPEC, looping, trained


def slow_down(monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """Let the host take longer for an update. Otherwise it may be done before the other thread looks."""

    update = HostUpdates.update

    def slow(*args: Any) -> None:
        time.sleep(seconds)
        update(*args)

    monkeypatch.setattr(HostUpdates, "update", slow)


@pytest.mark.parametrize("inside", [False, True], ids=["clipping", "inside-backward"])
@pytest.mark.parametrize("seed", [0, 1])
def test_whoever_does_it_the_bits_are_the_same(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    inside: bool,
) -> None:
    """The device takes an update at random, or waits until the host is done with one."""
    choice = random.Random(seed)

    def at_random(waiting: Sequence[Waiting], *_: float) -> int | None:
        possible = [index for index, update in enumerate(waiting) if update.device_ms < inf]
        return choice.choice([None, *possible])

    monkeypatch.setattr("protrain.engine.updates.host_updates.next_for_gpu", at_random)
    slow_down(monkeypatch, seconds=0.001)
    if inside:
        monkeypatch.setattr(Window, "is_closed", lambda _: True)  # as if the host had begun none in backward
    run = looping() if inside else looping(max_norm=0.5)
    steps = 200 if device.type == "cuda" else 12
    optimizer = trained(run, device, batches=steps, step_during_backward=inside)
    n_updates, streamed = (
        steps * (optimizer.plan.n_chunks - optimizer.plan.n_persist),
        optimizer.report().streamed_updates,
    )
    assert steps // 5 < streamed < n_updates - steps // 5


def trained_beside_a_late_host(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    *,
    spec: Spec = SPEC,
    needed_ms: float = 0.0,
    device_gparams: float = 1.0,
) -> Report:
    """The report of four steps. At first the host is taken for slow, and the device for as fast as ``device_gparams``.

    ``needed_ms`` is when the forward needs each chunk.
    """
    data, model = residual.batches(4), residual.make()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    streamer = optimizer._engine.updates.streamer
    assert streamer is not None
    sharing = streamer._sharing._replace(needed_ms=(needed_ms,) * optimizer.plan.n_chunks)
    monkeypatch.setattr(streamer, "_sharing", sharing)
    streamer.host_rate.gparams, streamer.rate.gparams = 1e-6, device_gparams
    Loop(max_norm=1e9).run(wrapped, optimizer, data)
    optimizer.state_dict()  # waits for all updates
    return optimizer.report()


def test_a_host_that_is_late_gets_help_and_one_in_time_gets_none(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(monkeypatch, seconds=0.005)
    monkeypatch.setattr(Rate, "add", lambda *_: None)
    assert trained_beside_a_late_host(device, monkeypatch).streamed_updates > 0
    assert trained_beside_a_late_host(device, monkeypatch, needed_ms=1e9).streamed_updates == 0


def test_a_first_update_that_compiles_its_kernel_does_not_end_the_help(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed, compiled = Chunk.step_streamed, threading.Event()

    def compiling(*args: Any) -> None:
        if not compiled.is_set():
            compiled.set()
            time.sleep(1.0)
        streamed(*args)

    monkeypatch.setattr(Chunk, "step_streamed", compiling)
    slow_down(monkeypatch, seconds=0.02)
    assert trained_beside_a_late_host(device, monkeypatch).streamed_updates > 1


def test_the_device_leaves_the_host_the_update_that_it_is_at(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm comes while the host does a speculative update. Nobody does that update a second time."""
    speculate = Chunk.step_speculatively

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(0.1)
        speculate(*args, **options)

    monkeypatch.setattr(Chunk, "step_speculatively", slowly)
    monkeypatch.setattr(Rate, "add", lambda *_: None)
    slow_down(monkeypatch, seconds=0.02)
    spec = Spec("none", "least", (NONE, CKPT), small=True, speculate=True, stream=True)
    report = trained_beside_a_late_host(device, monkeypatch, spec=spec)
    assert report.streamed_updates > 0 < report.speculative_updates
    assert report.redone_updates == 0


def test_a_rate_follows_what_is_measured() -> None:
    rate = Rate(5.0)
    assert rate.milliseconds(10_000_000) == pytest.approx(2.0)
    scalars = adam_scalars(lr=1.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)
    pieces = [(slice(0, 3000), scalars), (slice(4000, 5000), scalars)]
    rate.add(pieces, 4e-6)
    assert rate.gparams == pytest.approx(1.0), "nothing of the prediction is left"
    for _ in range(30):
        rate.add(pieces, 2e-6)
    assert rate.gparams == pytest.approx(2.0, rel=0.01)
    for _ in range(14):
        rate.forget()
    assert rate.gparams == pytest.approx(3.5, rel=0.02), "half of what was measured is left"
