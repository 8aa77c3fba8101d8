"""Updates before step(): committed when the step is as assumed, done again from untouched states when it is not."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from protrain.engine.states import chunks
from protrain.engine.updates.host_updates import HostUpdates, Window
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    NONE,
    Batch,
    Spec,
    Trainer,
    adamw,
    default_loss,
    wrap_under,
)
from tests.engine.speculative.trained import STEPS, clipping, counts, trained


@pytest.mark.parametrize(
    ("spec", "dtype", "max_norm"),
    [
        ("states", torch.bfloat16, None),
        ("states", torch.float16, 1e6),
        ("weights", torch.bfloat16, 1e6),
        ("weights", torch.float32, None),
        ("both", torch.float16, 1e6),
        ("both", torch.float32, None),
    ],
    indirect=["spec"],
)
def test_all_are_committed_when_nothing_is_clipped(
    spec: Spec, device: torch.device, dtype: torch.dtype, max_norm: float | None
) -> None:
    optimizer, n_chunks = trained(clipping(max_norm), device, spec, dtype=dtype)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


@pytest.mark.parametrize("spec", ["states", "weights", "both"], indirect=True)
def test_one_step_is_done_again_when_all_are_clipped(spec: Spec, device: torch.device) -> None:
    optimizer, n_chunks = trained(clipping(1e-3), device, spec)
    assert counts(optimizer) == (n_chunks, n_chunks)


def test_some_are_done_again_when_some_steps_are_clipped(spec: Spec, device: torch.device) -> None:
    norms: list[float] = []

    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> list[float]:
        norms.clear()
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            norms.append(float(optimizer.clip_grad_norm_(1e-3 if index in (2, 3) else 1e6)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    optimizer, n_chunks = trained(run, device, spec)
    # Steps 0, 1, 2 (redone), none in 3 and 4, for the step before was clipped, and 5.
    assert counts(optimizer) == (4 * n_chunks, n_chunks)


def test_with_persistent_chunks_as_well(device: torch.device) -> None:
    optimizer, n_chunks = trained(clipping(1e6), device, Spec("some", "least", (NONE,), small=True, speculate=True))
    assert counts(optimizer) == (STEPS * n_chunks, 0)


def test_accumulation_begins_in_the_last_backward(spec: Spec, device: torch.device) -> None:
    for no_sync in (False, True):
        run = clipping(1e6, accumulate=2, no_sync=no_sync)
        optimizer, n_chunks = trained(run, device, spec, accumulation=2)
        assert counts(optimizer) == (STEPS // 2 * n_chunks, 0)
    optimizer, n_chunks = trained(clipping(1e6, accumulate=2), device, spec, accumulation=3)
    assert counts(optimizer) == (0, 0), "a step of fewer backwards than planned has none"


def test_what_the_host_has_not_begun_by_the_end_of_backward_is_not_speculative(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        for batch in data:
            go = threading.Event()
            if isinstance(optimizer, ProTrainOptimizer):
                optimizer._engine.updates.worker.submit(functools.partial(_hold, go))
            default_loss(model, batch).backward()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            go.set()
            optimizer.zero_grad()

    optimizer, _ = trained(run, device, spec)
    assert counts(optimizer) == (0, 0)


def test_a_chunk_updated_in_stretches_has_the_same_bits(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, adam = [], chunks.adam

    def noted(weight: torch.Tensor, *args: Any, **options: Any) -> None:
        if "out" not in options:
            sizes.append(weight.numel())
        adam(weight, *args, **options)

    monkeypatch.setattr(chunks, "adam", noted)
    monkeypatch.setattr(chunks, "_SLICE_ELEMENTS", 256)
    monkeypatch.setattr(HostUpdates, "run_commits", lambda _: True)
    trained(clipping(1e-3), device, spec)
    assert max(sizes) == 256


@pytest.mark.slow
def test_two_steps_in_a_row_clip_each_by_its_own_factor(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, adam = itertools.count(1), chunks.adam

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.1)
        adam(*args, **options)

    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        default_loss(model, data[0]).backward()
        for max_norm in (1e6, 1e-3):  # the host has not done the first step when the second begins
            optimizer.clip_grad_norm_(max_norm)
            optimizer.step()
        optimizer.zero_grad()

    data, model = residual.batches(1), residual.make()
    _, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    n_chunks = optimizer.plan.n_chunks
    monkeypatch.setattr(Window, "is_closed", lambda _: next(begun) % n_chunks == 0)  # all but the last are speculative
    monkeypatch.setattr(chunks, "adam", slow)
    trained(run, device, spec)


def _hold(go: threading.Event) -> None:
    go.wait(60)
