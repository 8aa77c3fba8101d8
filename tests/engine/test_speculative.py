"""Updates before step(): committed when the step is as assumed, done again from untouched states when it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Case:
    """A training, and in how many of its steps updates are speculative, and done again."""

    spec: Spec
    speculative: int
    redone: int
    norms: Sequence[float | None] = (None,) * STEPS  # at which each step is clipped
    factors: Sequence[float] = (1.0,) * STEPS  # on the rates, between backward and step
    dtype: torch.dtype = torch.bfloat16

    def run(self, model: nn.Module, optimizer: Trainer, data: Sequence[Batch]) -> list[float]:
        found = []
        for batch, norm, factor in zip(data, self.norms, self.factors, strict=True):
            optimizer.backward(default_loss(model, batch))
            for group in optimizer.param_groups:
                group["lr"] *= factor
            if norm is not None:
                found.append(float(optimizer.clip_grad_norm_(norm)))
            optimizer.step()
            optimizer.zero_grad()
        return found


FREE, CLIPPED = 1e6, 1e-3
CASES = {
    "all states": Case(STATES, STEPS, 0),
    "weights in fp32": Case(WEIGHTS, STEPS, 0, dtype=torch.float32),
    "nothing is clipped in fp16": Case(BOTH, STEPS, 0, [FREE] * STEPS, dtype=torch.float16),
    # The first step is done again, and after a clipped step there are no speculative updates.
    **{f"{spec}, all are clipped": Case(spec, 1, 1, [CLIPPED] * STEPS) for spec in (STATES, WEIGHTS, BOTH)},
    "some are clipped": Case(BOTH, 4, 1, [FREE, FREE, CLIPPED, CLIPPED, FREE, FREE]),
    # Nor are there after one whose rates were not those of its backward.
    "rates change after backward": Case(BOTH, 1, 1, factors=[0.5] * STEPS),
    "rates change at first": Case(BOTH, 3, 1, factors=[0.5, 0.5, 0.5, 1.0, 1.0, 1.0]),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_are_committed_or_done_again(name: str, device: torch.device) -> None:
    case = CASES[name]
    optimizer, n_chunks = trained(case.run, device, case.spec, dtype=case.dtype)
    assert counts(optimizer) == (case.speculative * n_chunks, case.redone * n_chunks)


def test_accumulation_begins_in_the_last_backward(device: torch.device) -> None:
    for no_sync in (False, True):
        run = Loop(max_norm=1e6, accumulate=2, no_sync=no_sync).run
        optimizer, n_chunks = trained(run, device, BOTH, accumulation=2)
        assert counts(optimizer) == (STEPS // 2 * n_chunks, 0)
    optimizer, n_chunks = trained(Loop(max_norm=1e6, accumulate=2).run, device, BOTH, accumulation=3)
    assert counts(optimizer) == (0, 0), "a step of fewer backwards than planned has none"


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
