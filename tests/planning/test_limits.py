"""Frontier, largest depth and refusals, held against the search and the fingerprint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.planning import (
    Frontier,
    Largest,
    check,
    frontier,
    largest,
    search,
)
from protrain.planning.plan import name_other_use, refuse_other_model
from protrain.planning.sweeps import least_device_bytes
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord
from tests.planning.machines import H100

MIB = 1024**2
N = 8 * MIB


def make_profile(n: int, *, saved: int = 64 * MIB, movable: bool = True) -> ModelProfile:
    """``n`` equal blocks whose inputs stay alive from forward to backward, or are offloaded if they are ``movable``."""

    def segment(phase: str, index: int, duration: float) -> SegmentRecord:
        live = saved // 16 * index
        return SegmentRecord(phase=phase, block=index, live_bytes=live, peak_bytes=2 * saved, duration_ms=duration)

    return ModelProfile(
        model="M",
        dtype="bfloat16",
        device="cuda",
        batch_shapes={"ids": (8, 128)},
        tokens=1024,
        buffer_bytes=0,
        parameters=tuple(ParameterRecord(name=f"p{i}", shape=(N // 128, 128), group=i % 2) for i in range(n)),
        units=tuple(UnitRecord(name=f"u{i}", block=i, parameters=(i,)) for i in range(n)),
        calls=tuple(range(n)),
        blocks=tuple(
            BlockRecord(
                name=f"b{i}",
                saved_bytes=saved,
                saved_tensors=4,
                forward_peak_bytes=saved,
                input_bytes=saved // 16 if movable else 0,
                output_bytes=saved // 16,
                forward_ms=5.0,
                backward_ms=10.0,
                recompute_ms=5.0,
                forward_flops=10**11,
            )
            for i in range(n)
        ),
        segments=(
            *(segment("forward", i, 5.0) for i in range(n)),
            *(segment("backward", i, 15.0) for i in reversed(range(n))),
        ),
    )


def machine(device_mib: int, host_mib: int, **changes: Any) -> HardwareProfile:
    return replace(H100, contention=(), device_bytes=device_mib * MIB, host_bytes=host_mib * MIB, **changes)


# -- frontier ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_frontier_goes_from_the_least_that_works_to_all_there_is() -> None:
    traced, hardware = make_profile(8), machine(900, 4096)
    found = frontier(traced, hardware)
    limits = [point.device_limit_bytes for point in found.points]
    assert len(limits) >= 8
    assert limits == sorted(set(limits))
    assert limits[-1] == hardware.device_bytes
    assert search(traced, replace(hardware, device_bytes=limits[0])).device_bytes <= limits[0]
    with pytest.raises(PlanError):
        search(traced, replace(hardware, device_bytes=limits[0] - 1))
    for number, point in enumerate(found.points):
        assert point.plan.device_bytes <= point.device_limit_bytes
        if number % 4 == 0:
            alone = search(traced, replace(hardware, device_bytes=point.device_limit_bytes))
            assert point.plan.step_ms <= 1.01 * alone.step_ms
        assert point.tokens_per_s == pytest.approx(1024e3 / point.plan.step_ms)
    speeds = [point.tokens_per_s for point in found.points]
    assert speeds == sorted(speeds), "more memory never makes a step slower"
    assert speeds[-1] > 1.05 * speeds[0]
    assert Frontier.from_json(found.to_json()) == found
    header, plan, *rows = found.table().splitlines()
    assert (header.split()[-1], plan.split()) == ("tokens/s", ["plan"])
    shown = [row for row in rows if not row.startswith(" ")]
    assert len(shown) == len(limits)
    assert max(map(len, rows)) <= 80


def test_a_small_host_raises_the_least_device_memory() -> None:
    traced = make_profile(8)
    roomy, tight = (least_device_bytes(traced, machine(8192, size)) for size in (4096, 400))
    assert roomy is not None
    assert tight is not None
    assert tight > roomy
    # Exactly: one byte less and the search finds nothing.
    assert search(traced, replace(machine(1, 400), device_bytes=tight)).device_bytes == tight
    with pytest.raises(PlanError):
        search(traced, replace(machine(1, 400), device_bytes=tight - 1))
    assert least_device_bytes(traced, replace(machine(8192, 1), host_bytes=MIB // 2)) is None


def test_a_frontier_of_what_does_not_fit_says_so() -> None:
    with pytest.raises(PlanError, match="needed"):
        frontier(make_profile(8), machine(100, 4096))


# -- largest depth -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "movable", "where"),
    [
        (machine(1024, 1024), True, "host"),
        (machine(512, 100_000), False, "GPU"),  # inputs of checkpointed blocks fill the device first
        (machine(4096, 2048), True, "host"),
        (machine(512, 6000), True, "host"),
    ],
)
def test_the_largest_depth_has_a_plan_and_the_next_has_none(
    hardware: HardwareProfile, movable: bool, where: str
) -> None:
    asked = []

    def profile_of(layers: int) -> ModelProfile:
        asked.append(layers)
        return make_profile(layers, movable=movable)

    found = largest(profile_of, hardware, most_layers=200)
    assert 4 < found.layers < 200
    plan = search(make_profile(found.layers, movable=movable), hardware)
    assert found.plan.step_ms <= 1.25 * plan.step_ms
    assert found.plan.device_bytes <= hardware.device_bytes
    assert found.plan.host_bytes <= hardware.host_bytes
    assert found.parameters == found.layers * N
    assert found.tokens_per_s == pytest.approx(1024e3 / found.plan.step_ms)
    with pytest.raises(PlanError) as raised:
        search(make_profile(found.layers + 1, movable=movable), hardware)
    assert raised.value.where == where
    assert found.one_more.startswith(f"no plan fits the {where} memory: needed")
    assert len(set(asked)) == len(asked) <= 8, "a profile takes seconds"
    assert Largest.from_json(found.to_json()) == found


def test_offloaded_inputs_let_a_model_be_deeper() -> None:
    hardware = machine(512, 6000)
    kept = largest(lambda layers: make_profile(layers, movable=False), hardware)
    moved = largest(make_profile, hardware)
    assert moved.layers > 1.1 * kept.layers
    assert moved.plan.n_ckpt_swap > 0


def test_the_search_for_depth_ends_somewhere() -> None:
    found = largest(make_profile, machine(80_000, 80_000), most_layers=12)
    assert (found.layers, found.one_more) == (12, "")
    assert "not tried" in found.table()
    assert f"{1024e3 / found.plan.step_ms:,.0f} tokens/s" in found.table()
    assert largest(make_profile, machine(80_000, 80_000), most_layers=1).layers == 1


def test_a_machine_too_small_for_one_layer_says_so() -> None:
    with pytest.raises(PlanError, match="no plan fits the GPU memory"):
        largest(make_profile, machine(64, 4096))


# -- plans for something else ------------------------------------------------------------------------------------------


def test_the_difference_is_named() -> None:
    traced, hardware = make_profile(6), machine(8192, 4096)
    plan = search(traced, hardware)
    refuse_other_model(plan, traced)
    one_group = tuple(replace(record, group=0) for record in traced.parameters)
    other_shapes = tuple(replace(record, shape=(128, N // 128)) for record in traced.parameters)

    def refusal(profile: ModelProfile, words: str) -> None:
        with pytest.raises(ValueError, match=f"made for another model than M: {words}.*make a new plan"):
            refuse_other_model(plan, profile)

    refusal(replace(traced, dtype="float16"), "its dtype differs, bfloat16 in place of float16")
    refusal(make_profile(5), "it has 6 blocks, this one 5")
    refusal(replace(traced, parameters=other_shapes), "its parameters or their optimizer groups differ")
    refusal(replace(traced, parameters=one_group), "its parameters or their optimizer groups differ")
    plan = search(replace(traced, parameters=one_group), hardware)
    refusal(traced, "its optimizer has a single group of parameters, this one several")


def test_a_plan_for_chunked_loss_that_does_not_fit_whole_logits_names_the_loss() -> None:
    whole = make_profile(6)
    plan = search(replace(whole, chunked_loss=True), machine(512, 4096))

    def refusal(**memory: int) -> PlanError:
        with pytest.raises(PlanError) as raised:
            check(plan, whole, machine(**{"device_mib": 512, "host_mib": 4096} | memory))
        return name_other_use(raised.value, plan, whole)

    assert "made for chunked_loss=True, and here logits are whole" in str(refusal(device_mib=100)), "a GPU's memory"
    assert "chunked_loss" not in str(refusal(host_mib=100)), "logits take no host memory"
