"""Speculative updates that are redone, after edits, errors or other hyperparameters between backward and step()."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.engine.states.chunks import Chunk
from protrain.engine.streams import Mark
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning.plan import layout_of
from tests.engine import residual
from tests.engine.harness import (
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


def test_a_replaced_list_of_groups_counts(spec: Spec, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        optimizer.param_groups = [{**group, "lr": 1e-4} for group in optimizer.param_groups]
        Loop().run(model, optimizer, data)

    optimizer, n_chunks = trained(run, device, spec)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


def test_a_wrong_hyperparameter_is_said_by_step(spec: Spec, device: torch.device) -> None:
    data, model = residual.batches(2), residual.make()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device)
    before = states(wrapped, optimizer)
    optimizer.param_groups[0]["lr"] = -1.0
    default_loss(wrapped, data[0]).backward()
    with pytest.raises(ValueError, match="lr must be finite and at least 0"):
        optimizer.step()
    assert_same(states(wrapped, optimizer), before)


def test_gradients_forgotten_without_a_step(spec: Spec, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            if index % 2:
                optimizer.step()
            optimizer.zero_grad()

    optimizer, n_chunks = trained(run, device, spec)
    assert counts(optimizer) == (STEPS // 2 * n_chunks, 0)


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


@pytest.mark.parametrize("spec", ["states", "weights", "both"], indirect=True)
def test_host_memory_is_as_planned(spec: Spec, device: torch.device) -> None:
    data, model = residual.batches(1), residual.make(width=256)
    profile = protrain.profile(model, data[0], optimizer=adamw(model), device=device, dtype=torch.bfloat16)
    with_room, without = (
        make_plan(dataclasses.replace(spec, speculate=speculate), profile, device) for speculate in (True, False)
    )
    sizes = [chunk.elements for chunk in layout_of(profile, with_room).chunks]
    n_weight_only = with_room.n_weight_only
    assert with_room.host_bytes - without.host_bytes == 2 * sum(sizes[:n_weight_only]) + 12 * sum(sizes[n_weight_only:])
    _, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    assert optimizer.plan.host_bytes == with_room.host_bytes
    report = optimizer.report()
    assert 0 <= report.predicted_host_bytes - report.host_bytes <= 2 * 1024**2


def test_plans_that_contradict_themselves_are_refused(spec: Spec, device: torch.device) -> None:
    data, model = residual.batches(1), residual.make()
    profile = protrain.profile(model, data[0], optimizer=adamw(model), device=device)
    plan = make_plan(spec, profile, device)
    for wrong, inside, message in (
        (plan, True, "n_speculate must be 0 to 0, .*: with step_during_backward=True"),
        (dataclasses.replace(plan, n_speculate=99), False, "n_speculate must be 0 to"),
    ):
        with pytest.raises(ValueError, match=message):
            protrain.wrap(
                model,
                adamw(model),
                example_batch=data[0],
                device=device,
                plan=wrong,
                step_during_backward=inside,
            )


def test_a_default_dtype_of_the_user_changes_nothing(spec: Spec, device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> list[float]:
        if isinstance(optimizer, ProTrainOptimizer):
            torch.set_default_dtype(torch.float64)
        try:
            return Loop().run(model, optimizer, data)
        finally:
            torch.set_default_dtype(torch.float32)

    optimizer, n_chunks = trained(run, device, spec, dtype=torch.float16)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


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
                optimizer._engine.updates.wait()
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
            for _ in optimizer._engine.chunks:  # of each
                with pytest.raises(ArithmeticError, match="the speculative update failed"):
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
    raise ArithmeticError("the speculative update failed")


def test_the_end_of_a_backward_is_placed_before_the_host_asks_for_it(
    spec: Spec, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    data, model = residual.batches(1), residual.make()
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    compute, rounds = optimizer._engine.streams.compute, [optimizer._engine.updates._window]
    place, seen = compute.place, []

    def placed(mark: Mark) -> None:  # an event that was never recorded counts as reached
        seen.append(rounds[0].end is not mark)
        place(mark)

    monkeypatch.setattr(compute, "place", placed)
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
    assert rounds[0].end is not None
    assert all(seen)
