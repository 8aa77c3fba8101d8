"""Updates before step(): adopted when the step is as supposed, done again from untouched states when it is not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.engine.gradients.gradients import Gradients
from protrain.engine.states import chunks
from protrain.engine.states.chunks import Chunk
from protrain.engine.streams import Mark
from protrain.engine.updates.turns import Ahead
from protrain.engine.updates.updates import _Round
from protrain.optim import ProTrainOptimizer
from protrain.planning.plan import layout_of
from protrain.tracing import _Recorder
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    NONE,
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

SPEC = Spec("none", "least", (NONE, CKPT), early=True)
STEPS = 6
Run = Callable[[nn.Module, Any, list[Batch]], Any]


@pytest.fixture(autouse=True, params=["states", "weights", "both"])
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Early updates of all states, of weights alone, or some of either."""
    weights, whole = request.param != "states", request.param == "both"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.SPEC", dataclasses.replace(SPEC, weights=weights, whole=whole))
        yield


@pytest.fixture(autouse=True)
def early_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host had begun every early update before backward was over."""
    monkeypatch.setattr(_Round, "is_over", lambda _: False)


def trained(
    run: Run, device: torch.device, *, spec: Spec = SPEC, dtype: torch.dtype = torch.bfloat16
) -> tuple[ProTrainOptimizer, int]:
    """What ``run`` trained, whose bits are those of the plain loop; and the number of chunks in host memory."""
    data = residual.batches(STEPS)
    model, again = residual.make(), residual.make()
    plain, trainer = prepare_plain(model, adamw(model), device=device, dtype=dtype)
    wrapped, optimizer = wrap_under(spec, again, adamw(again), data[0], device=device, dtype=dtype)
    torch.manual_seed(1)
    expected = run(plain, trainer, data)
    torch.manual_seed(1)
    assert run(wrapped, optimizer, data) == expected
    assert_same(states(wrapped, optimizer), states(plain, trainer))
    plan = optimizer.plan
    assert plan.n_speculate == plan.n_chunks - plan.n_persist > 0
    assert plan.early_weights == spec.weights
    assert plan.n_whole == (plan.n_speculate // 2 if spec.whole else 0)
    assert not spec.whole or 0 < plan.n_whole < plan.n_speculate
    return optimizer, plan.n_speculate


def counts(optimizer: ProTrainOptimizer) -> tuple[int, int]:
    report = optimizer.report()
    return report.early_updates, report.redone_updates


def updated_on_host(optimizer: ProTrainOptimizer) -> float:
    """How often the report's rate counts the states in host memory."""
    optimizer._engine.wait_for_updates()
    elements, seconds = (sum(part) for part in zip(*optimizer._updates.tally.counted, strict=True))
    assert optimizer.report().host_gparams == elements / seconds / 1e9
    return elements / sum(chunk.elements for chunk in optimizer._engine.chunks if not chunk.persistent)


def clipping(max_norm: float | None, **options: Any) -> Run:
    return lambda model, optimizer, data: Loop(max_norm=max_norm, **options).run(model, optimizer, data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("max_norm", [None, 1e6], ids=["no-clipping", "never-clipped"])
def test_all_are_adopted_when_nothing_is_clipped(
    device: torch.device, dtype: torch.dtype, max_norm: float | None
) -> None:
    optimizer, n_chunks = trained(clipping(max_norm), device, dtype=dtype)
    assert counts(optimizer) == (STEPS * n_chunks, 0)
    assert updated_on_host(optimizer) == STEPS


def test_one_step_is_done_again_when_all_are_clipped(device: torch.device) -> None:
    optimizer, n_chunks = trained(clipping(1e-3), device)
    assert counts(optimizer) == (n_chunks, n_chunks)
    assert updated_on_host(optimizer) == STEPS + 1


def test_some_are_done_again_when_some_steps_are_clipped(device: torch.device) -> None:
    norms: list[float] = []

    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> list[float]:
        norms.clear()
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            norms.append(float(optimizer.clip_grad_norm_(1e-3 if index in (2, 3) else 1e6)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    optimizer, n_chunks = trained(run, device)
    # Steps 0, 1, 2 (redone), none in 3 and 4, for the step before was clipped, and 5.
    assert counts(optimizer) == (4 * n_chunks, n_chunks)


def test_with_persistent_chunks_as_well(device: torch.device) -> None:
    optimizer, n_chunks = trained(clipping(1e6), device, spec=Spec("some", "least", (NONE,), small=True, early=True))
    assert counts(optimizer) == (STEPS * n_chunks, 0)


def test_accumulation_begins_in_the_last_backward(device: torch.device) -> None:
    optimizer, n_chunks = trained(clipping(1e6, accumulate=2), device)
    # The first step cannot know that a second backward follows: what was begun is dropped.
    assert counts(optimizer) == ((STEPS // 2 - 1) * n_chunks, 0)
    optimizer, n_chunks = trained(clipping(1e6, accumulate=2, no_sync=True), device)
    assert counts(optimizer) == (STEPS // 2 * n_chunks, 0)


def test_what_the_host_has_not_begun_by_the_end_of_backward_is_not_early(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        for batch in data:
            go = threading.Event()
            if isinstance(optimizer, ProTrainOptimizer):
                optimizer._engine.worker.submit(functools.partial(_hold, go))
            default_loss(model, batch).backward()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            go.set()
            optimizer.zero_grad()

    optimizer, _ = trained(run, device)
    assert counts(optimizer) == (0, 0)


@pytest.mark.parametrize("idle", [0, 2, 4])
@pytest.mark.parametrize("inside", [False, True], ids=["early", "inside-backward"])
def test_what_is_done_goes_up_while_the_host_makes_what_is_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, inside: bool, idle: int
) -> None:
    data, model = residual.batches(STEPS), residual.make()
    spec = dataclasses.replace(SPEC, early=not inside)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "step_during_backward": inside}
    wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], **options)
    n_chunks, begun = optimizer.plan.n_chunks, itertools.count(1)
    times: list[tuple[str, int, int]] = []
    optimizer._engine.worker.times = times

    def link_is_idle() -> bool:
        return sum(name.startswith("update") for name, _, _ in times) % n_chunks < idle

    # As if the host had begun all but the last before backward was over, and the link had time for so many chunks.
    monkeypatch.setattr(_Round, "is_over", lambda _: next(begun) % n_chunks == 0)
    monkeypatch.setattr(optimizer._updates._ahead, "_link_is_idle", link_is_idle)
    losses = Loop().run(wrapped, optimizer, data)
    found = states(wrapped, optimizer)
    order = [int(name.split()[-1]) for name, _, _ in times if name.startswith("update")]
    kind = "weight" if SPEC.weights and not inside else "update"
    assert times[n_chunks - 1][0] == f"early {kind} 0", "its gradient comes last"
    assert order == STEPS * [*range(1, 1 + idle), 0, *range(1 + idle, n_chunks)]
    plain, trainer = prepare_plain(again := residual.make(), adamw(again), device=device, dtype=torch.bfloat16)
    assert Loop().run(plain, trainer, data) == losses
    assert_same(found, states(plain, trainer))


def test_a_chunk_updated_in_stretches_has_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, adam = [], chunks.adam

    def noted(weight: torch.Tensor, *args: Any, **options: Any) -> None:
        sizes.append(weight.numel())
        adam(weight, *args, **options)

    monkeypatch.setattr(chunks, "adam", noted)
    monkeypatch.setattr(chunks, "_STRETCH", 256)
    monkeypatch.setattr(Ahead, "take", lambda _: True)
    trained(clipping(1e-3), device)
    assert max(sizes) == 256


def test_two_steps_in_a_row_clip_each_by_its_own_factor(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
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
    _, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    n_chunks = optimizer.plan.n_chunks
    monkeypatch.setattr(_Round, "is_over", lambda _: next(begun) % n_chunks == 0)  # all but the last are made early
    monkeypatch.setattr(chunks, "adam", slow)
    trained(run, device)


def _hold(go: threading.Event) -> None:
    go.wait(60)


@pytest.mark.parametrize(("changes", "early_steps"), [(STEPS, 1), (3, 3)], ids=["always", "at-first"])
def test_hyperparameters_changed_after_backward(device: torch.device, changes: int, early_steps: int) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            for group in optimizer.param_groups if index < changes else []:
                group["lr"] *= 0.5
            optimizer.step()
            optimizer.zero_grad()

    optimizer, n_chunks = trained(run, device)
    # Step 0 is done again; then none until the one after a step whose rates were those of its backward.
    assert counts(optimizer) == (early_steps * n_chunks, n_chunks)


def test_a_replaced_list_of_groups_counts(device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        optimizer.param_groups = [{**group, "lr": 1e-4} for group in optimizer.param_groups]
        Loop().run(model, optimizer, data)

    optimizer, n_chunks = trained(run, device)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


def test_a_wrong_hyperparameter_is_said_by_step(device: torch.device) -> None:
    data, model = residual.batches(2), residual.make()
    wrapped, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device)
    before = states(wrapped, optimizer)
    optimizer.param_groups[0]["lr"] = -1.0
    default_loss(wrapped, data[0]).backward()
    with pytest.raises(ValueError, match="lr must be finite and at least 0"):
        optimizer.step()
    assert_same(states(wrapped, optimizer), before)


def test_gradients_forgotten_without_a_step(device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> None:
        for index, batch in enumerate(data):
            default_loss(model, batch).backward()
            if index % 2:
                optimizer.step()
            optimizer.zero_grad()

    optimizer, n_chunks = trained(run, device)
    assert counts(optimizer) == (STEPS // 2 * n_chunks, 0)


def test_states_between_backward_and_step_are_those_before(device: torch.device) -> None:
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

    optimizer, n_chunks = trained(run, device)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


def test_edits_between_backward_and_step_count(device: torch.device) -> None:
    data, results = residual.batches(3), []
    for spec in (SPEC, dataclasses.replace(SPEC, early=False)):
        model = residual.make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
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
    early, redone = results[0][1]
    assert early == redone > 0
    assert results[1][1] == (0, 0)


def test_copies_of_a_weight_are_traced_under_its_name(device: torch.device) -> None:
    data, model = residual.batches(1), residual.make()
    wrapped, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    names = _Recorder(optimizer._engine)._names
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
    optimizer._engine.wait_for_updates()
    assert counts(optimizer)[0] > 0
    for chunk in optimizer._engine.chunks:  # the copies have changed places
        assert names[chunk.weight.data_ptr()] == f"weights {chunk.index}"


def test_host_memory_is_as_planned(device: torch.device) -> None:
    data, model = residual.batches(1), residual.make(width=256)
    profile = protrain.profile(model, data[0], optimizer=adamw(model), device=device, dtype=torch.bfloat16)
    with_room, without = (make_plan(dataclasses.replace(SPEC, early=early), profile, device) for early in (True, False))
    sizes = [chunk.elements for chunk in layout_of(profile, with_room).chunks]
    n_alone = with_room.n_speculate - with_room.n_whole if SPEC.weights else 0
    assert with_room.host_bytes - without.host_bytes == 2 * sum(sizes[:n_alone]) + 12 * sum(sizes[n_alone:])
    _, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    assert optimizer.plan.host_bytes == with_room.host_bytes
    report = optimizer.report()
    assert 0 <= report.predicted_host_bytes - report.host_bytes <= 2 * 1024**2


def test_plans_that_contradict_themselves_are_refused(device: torch.device) -> None:
    data, model = residual.batches(1), residual.make()
    profile = protrain.profile(model, data[0], optimizer=adamw(model), device=device)
    plan = make_plan(SPEC, profile, device)
    for wrong, inside, message in (
        (plan, True, "n_speculate must be 0 with step_during_backward=True"),
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


def test_a_default_dtype_of_the_user_changes_nothing(device: torch.device) -> None:
    def run(model: nn.Module, optimizer: Trainer, data: list[Batch]) -> list[float]:
        if isinstance(optimizer, ProTrainOptimizer):
            torch.set_default_dtype(torch.float64)
        try:
            return Loop().run(model, optimizer, data)
        finally:
            torch.set_default_dtype(torch.float32)

    optimizer, n_chunks = trained(run, device, dtype=torch.float16)
    assert counts(optimizer) == (STEPS * n_chunks, 0)


def test_a_backward_that_fails_between_the_gradients_of_a_unit_leaves_no_early_update_behind(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, results = residual.batches(1), []
    make_accumulator = Gradients._make_accumulator
    for early in (True, False):
        model, spec = residual.make(), dataclasses.replace(SPEC, small=True, early=early)
        wrapped, optimizer = wrap_under(spec, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
        first, *_, last = next(unit.chunks for unit in optimizer._engine.units if len(unit.chunks) > 1)

        def room_until(gradients: Gradients, chunk: Chunk, last: Chunk = last) -> None:
            if chunk is last:
                raise MemoryError("no room")
            make_accumulator(gradients, chunk)

        monkeypatch.setattr(Gradients, "_make_accumulator", room_until)
        torch.manual_seed(1)
        default_loss(wrapped, data[0]).backward()
        with pytest.raises(MemoryError, match="no room"):
            default_loss(wrapped, data[0]).backward()
        assert first.accumulator is not None
        optimizer.step()
        results.append(states(wrapped, optimizer))
        assert (counts(optimizer)[0] > 0) == early
    assert_same(results[0], results[1])


def test_an_error_in_an_early_update_is_raised_once_and_harms_no_state(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = residual.batches(3)
    results = []
    for fails in (False, True):
        model = residual.make()
        wrapped, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
        for index, batch in enumerate(data):
            with monkeypatch.context() as patch:
                if fails and index == 0:
                    patch.setattr(Chunk, "step_aside", _fail)
                torch.manual_seed(index)
                default_loss(wrapped, batch).backward()
                optimizer.step()
                optimizer._engine.wait_for_updates()
            optimizer.zero_grad()
            if fails and index == 0:
                for _ in optimizer._engine.chunks:  # of each
                    with pytest.raises(ArithmeticError, match="the early update failed"):
                        default_loss(wrapped, batch).backward()
                    optimizer.zero_grad()
        results.append(states(wrapped, optimizer))
    assert_same(results[1], results[0])


def _fail(*_: Any, **__: Any) -> None:
    raise ArithmeticError("the early update failed")


def test_the_end_of_a_backward_is_placed_before_the_host_asks_for_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    data, model = residual.batches(1), residual.make()
    wrapped, optimizer = wrap_under(SPEC, model, adamw(model), data[0], device=device, dtype=torch.bfloat16)
    streams, rounds = optimizer._engine.streams, [optimizer._updates._round]
    place, seen = streams.compute_reached, []

    def placed(mark: Mark) -> None:  # an event that was never recorded counts as reached
        seen.append(rounds[0].end is not mark)
        place(mark)

    monkeypatch.setattr(streams, "compute_reached", placed)
    default_loss(wrapped, data[0]).backward()
    optimizer.step()
    assert rounds[0].end is not None
    assert all(seen)
