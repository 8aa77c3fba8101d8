"""Updates before step(): committed when the step is as assumed, done again from untouched states when it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from protrain.engine.states.chunks import Chunk
from protrain.engine.updates.host_updates import Window
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    Batch,
    Loop,
    Run,
    Spec,
    Trainer,
    assert_same,
    check_equal_to_plain,
    default_loss,
    states,
)

STATES = Spec("none", "least", "nc", speculate=True)
WEIGHTS = replace(STATES, weights=True)
BOTH = replace(WEIGHTS, whole=True)  # all states of some chunks, and the weights of the others


@pytest.fixture(autouse=True)
def always_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host had begun every speculative update before backward was over."""
    monkeypatch.setattr(Window, "is_closed", lambda _: False)


STEPS = 6


def trained(run: Run, device: torch.device, spec: Spec, **options: Any) -> tuple[ProTrainOptimizer, int]:
    """What ``run`` trained to the plain loop's bits, and the number of chunks in host memory."""
    options = {"dtype": torch.bfloat16, "device": device, **options}
    (optimizer,) = check_equal_to_plain(residual.make, residual.batches(STEPS), run=run, specs=[spec], **options)
    plan = optimizer.plan
    assert plan.n_speculate == plan.n_chunks - plan.n_persist > 0
    n_whole = plan.n_speculate - plan.n_weight_only
    assert (plan.n_weight_only > 0) == spec.weights
    assert not spec.weights or n_whole == (plan.n_speculate // 2 if spec.whole else 0)
    assert not spec.whole or 0 < n_whole < plan.n_speculate
    return optimizer, plan.n_speculate


def counts(optimizer: ProTrainOptimizer) -> tuple[int, int]:
    report = optimizer.report()
    return report.speculative_updates, report.redone_updates


@pytest.mark.parametrize(
    ("spec", "dtype", "max_norm"),
    [(STATES, torch.bfloat16, None), (WEIGHTS, torch.float32, None), (BOTH, torch.float16, 1e6)],
    ids=str,
)
def test_all_are_committed_when_nothing_is_clipped(
    spec: Spec, device: torch.device, dtype: torch.dtype, max_norm: float | None
) -> None:
    optimizer, n_chunks = trained(Loop(max_norm=max_norm).run, device, spec, dtype=dtype)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


@pytest.mark.parametrize("spec", [STATES, WEIGHTS, BOTH], ids=str)
def test_one_step_is_done_again_when_all_are_clipped(spec: Spec, device: torch.device) -> None:
    optimizer, n_chunks = trained(Loop(max_norm=1e-3).run, device, spec)
    assert counts(optimizer) == (n_chunks, n_chunks)


def test_some_are_done_again_when_some_steps_are_clipped(device: torch.device) -> None:
    norms: list[float] = []

    def run(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> list[float]:
        norms.clear()
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            norms.append(float(optimizer.clip_grad_norm_(1e-3 if index in (2, 3) else 1e6)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    optimizer, n_chunks = trained(run, device, BOTH)
    # Steps 0, 1, 2 (redone), none in 3 and 4, for the step before was clipped, and 5.
    assert counts(optimizer) == (4 * n_chunks, n_chunks)


def test_accumulation_begins_in_the_last_backward(device: torch.device) -> None:
    for no_sync in (False, True):
        run = Loop(max_norm=1e6, accumulate=2, no_sync=no_sync).run
        optimizer, n_chunks = trained(run, device, BOTH, accumulation=2)
        assert counts(optimizer) == (STEPS // 2 * n_chunks, 0)
    optimizer, n_chunks = trained(Loop(max_norm=1e6, accumulate=2).run, device, BOTH, accumulation=3)
    assert counts(optimizer) == (0, 0), "a step of fewer backwards than planned has none"


@pytest.mark.parametrize(("changes", "speculative_steps"), [(STEPS, 1), (3, 3)], ids=["always", "at-first"])
def test_hyperparameters_changed_after_backward(device: torch.device, changes: int, speculative_steps: int) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> None:
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            for group in optimizer.param_groups if index < changes else []:
                group["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()

    optimizer, n_chunks = trained(run, device, BOTH)
    # Step 0 is done again; then none until the one after a step whose rates were those of its backward.
    assert counts(optimizer) == (speculative_steps * n_chunks, n_chunks)


def test_a_step_redoes_a_speculative_update_that_failed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    data = residual.batches(3)
    results = []
    for fails in (False, True):
        wrapped, optimizer = residual.wrapped(BOTH, device=device, dtype=torch.bfloat16)
        for index, batch in enumerate(data):
            with monkeypatch.context() as patch:
                if fails and index == 0:
                    patch.setattr(Chunk, "adam_speculatively", _fail)
                torch.manual_seed(index)
                default_loss(wrapped, batch).backward()
                optimizer.step()
                optimizer.state_dict()  # waits for all updates
            optimizer.zero_grad()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


def _fail(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the update failed")


def test_states_that_could_not_follow_their_weight_are_missed_for_good(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weight is a step ahead: nothing may be read or trained on."""
    data = residual.batches(1)
    wrapped, optimizer = residual.wrapped(WEIGHTS, device=device, dtype=torch.bfloat16)
    default_loss(wrapped, data[0]).backward()
    monkeypatch.setattr(Chunk, "adam", _fail)
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        for use in (optimizer.state_dict, lambda: default_loss(wrapped, data[0]).backward()):
            with pytest.raises(ArithmeticError, match="the update failed"):
                use()


def test_hyperparameters_that_are_invalid_during_backward_alone(device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> None:
        group = optimizer.param_groups[0]
        for batch in data:
            right, group["lr"] = group["lr"], -1.0
            default_loss(model, batch).backward()
            group["lr"] = right
            optimizer.step()
            optimizer.zero_grad()

    optimizer, _ = trained(run, device, BOTH)
    assert counts(optimizer) == (0, 0)
