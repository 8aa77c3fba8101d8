"""Speculative updates of weights alone: when their states follow, and what it means when they cannot.

What both kinds of speculative updates have in common is in speculative/.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.host_updates import Window
from tests.engine import residual
from tests.engine.harness import CKPT, NONE, Spec, adamw, default_loss, wrap_under
from tests.engine.speculative.trained import names_of_jobs

ALL = Spec("none", "least", (NONE, CKPT), speculate=True, weights=True)
HALF = Spec("none", "least", (CKPT,), speculate=True, weights=True, stream=True)


@pytest.fixture(autouse=True)
def always_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host had begun every speculative update before backward was over."""
    monkeypatch.setattr(Window, "is_closed", lambda _: False)


def fail(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the states cannot follow")


def test_states_follow_their_weight_when_nothing_else_waits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protrain.engine.updates.host_updates.next_for_gpu", lambda *_: None)
    data, model = residual.batches(3), residual.make()
    wrapped, optimizer = wrap_under(HALF, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    worker, n_speculate = optimizer._engine.updates.worker, optimizer.plan.n_speculate
    late = [chunk.index for chunk in optimizer._engine.chunks if chunk.index >= n_speculate]
    assert n_speculate
    assert late
    done = names_of_jobs(worker, monkeypatch)
    for batch in data:
        done.clear()
        default_loss(wrapped, batch).backward()
        optimizer.step()
        optimizer._engine.updates.wait()
        optimizer.zero_grad()
        names = [name for name in done if name.startswith(("update", "deferred"))]
        assert names == [
            *(f"update {index}" for index in [*range(n_speculate), *late]),
            *(f"deferred update {index}" for index in reversed(range(n_speculate))),
        ]
        assert all(chunk.current_weight is chunk.weight for chunk in optimizer._engine.chunks)


def test_states_that_could_not_follow_are_missed_for_good(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weight is a step ahead: nothing may be read or trained on."""
    data, model = residual.batches(1), residual.make()
    wrapped, optimizer = wrap_under(ALL, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    default_loss(wrapped, data[0]).backward()
    monkeypatch.setattr(Chunk, "step", fail)
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="the states cannot follow"):
            optimizer.state_dict()
        with pytest.raises(ArithmeticError, match="the states cannot follow"):
            default_loss(wrapped, data[0]).backward()
