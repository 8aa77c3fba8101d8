"""Speculative updates that are redone, after edits, errors or other hyperparameters between backward and step()."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.engine.states.chunks import Chunk
from tests.engine import residual
from tests.engine.harness import (
    Batch,
    Spec,
    Trainer,
    adamw,
    assert_same,
    default_loss,
    states,
    wrap_under,
)
from tests.engine.speculative.trained import STEPS, counts, trained


@pytest.mark.parametrize(("changes", "speculative_steps"), [(STEPS, 1), (3, 3)], ids=["always", "at-first"])
def test_hyperparameters_changed_after_backward(
    spec: Spec, device: torch.device, changes: int, speculative_steps: int
) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            for group in optimizer.param_groups if index < changes else []:
                group["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()

    optimizer, n_chunks = trained(run, device, spec)
    # Step 0 is done again; then none until the one after a step whose rates were those of its backward.
    assert counts(optimizer) == (speculative_steps * n_chunks, n_chunks)


def test_states_between_backward_and_step_are_those_before(spec: Spec, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> list[float]:
        values = []
        for batch in data:
            default_loss(model, batch).backward()
            values += [float(value.double().sum()) for _, value in sorted(states(model, optimizer).items())]
            with torch.no_grad():
                values.append(float(default_loss(model.eval(), batch)))
            model.train()
            optimizer.step()
            optimizer.zero_grad()
        return values

    optimizer, n_chunks = trained(run, device, spec)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


def test_edits_between_backward_and_step_count(spec: Spec, device: torch.device) -> None:
    data, results = residual.batches(3), []
    for chosen in (spec, dataclasses.replace(spec, speculate=False)):
        model = residual.make()
        wrapped, optimizer = wrap_under(chosen, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
        torch.manual_seed(1)
        for batch in data:
            default_loss(wrapped, batch).backward()
            with protrain.full_parameters(wrapped):
                for parameter in wrapped.parameters():
                    parameter.data.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        results.append((states(wrapped, optimizer), counts(optimizer)))
    assert_same(results[0][0], results[1][0])
    speculative, redone = results[0][1]
    assert speculative == redone > 0
    assert results[1][1] == (0, 0)


def test_a_step_redoes_a_speculative_update_that_failed(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = residual.batches(3)
    results = []
    for fails in (False, True):
        model = residual.make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
        for index, batch in enumerate(data):
            with monkeypatch.context() as patch:
                if fails and index == 0:
                    patch.setattr(Chunk, "step_speculatively", _fail)
                torch.manual_seed(index)
                default_loss(wrapped, batch).backward()
                optimizer.step()
                optimizer.state_dict()  # waits for all updates
            optimizer.zero_grad()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


def test_an_error_in_a_speculative_update_that_no_step_redoes_is_raised_once(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = residual.batches(3)
    results = []
    for fails in (False, True):
        model = residual.make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(Chunk, "step_speculatively", _fail)
                default_loss(wrapped, data[0]).backward()
                optimizer._engine.updates.wait()
            optimizer.zero_grad()
            for _ in range(optimizer.plan.n_chunks):
                with pytest.raises(ArithmeticError, match="the update failed"):
                    default_loss(wrapped, data[0]).backward()
                optimizer.zero_grad()
        for index, batch in enumerate(data):
            torch.manual_seed(index)
            default_loss(wrapped, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


def _fail(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the update failed")


@pytest.mark.parametrize("spec", ["weights"], indirect=True)
def test_states_that_could_not_follow_their_weight_are_missed_for_good(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weight is a step ahead: nothing may be read or trained on."""
    data, model = residual.batches(1), residual.make()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    default_loss(wrapped, data[0]).backward()
    monkeypatch.setattr(Chunk, "step", _fail)
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        for use in (optimizer.state_dict, lambda: default_loss(wrapped, data[0]).backward()):
            with pytest.raises(ArithmeticError, match="the update failed"):
                use()
