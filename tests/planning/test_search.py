"""The search: feasible when anything is, no worse than any plan by hand, and clear when nothing fits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import protrain
from protrain.common.errors import PlanError
from protrain.common.tables import parse_memory
from protrain.hardware.profile import HardwareProfile
from protrain.planning import (
    BlockMode,
    Plan,
    block_modes,
    check,
    evaluate,
    fingerprint,
    pack,
    predict,
    search,
)
from protrain.planning.simulate import Run, simulate
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord
from tests.planning.machines import H100

profile = partial(protrain.profile, device="cpu")
NONE, CKPT, SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP
MIB = 1024**2


def make_profile(
    n_blocks: int = 6, *, elements: int = 8 * MIB, saved: int = 400 * MIB, ms: float = 20.0
) -> ModelProfile:
    """A model of equal blocks between an embedding and a head, as a trace on a GPU would give it."""
    blocks = tuple(
        BlockRecord(
            name=f"layers.{n}",
            saved_bytes=saved,
            saved_tensors=10,
            forward_peak_bytes=saved + saved // 8,
            input_bytes=saved // 16,
            output_bytes=saved // 16,
            forward_ms=ms,
            backward_ms=2 * ms,
            recompute_ms=ms,
            forward_flops=10**12,
        )
        for n in range(n_blocks)
    )
    segments = []
    live = 0
    for n in range(n_blocks):
        segments += [
            SegmentRecord(phase="forward", block=None, live_bytes=live, peak_bytes=MIB, duration_ms=0.5),
            SegmentRecord(phase="forward", block=n, live_bytes=live, peak_bytes=saved // 4, duration_ms=ms),
        ]
        live += saved // 16
    for phase in ("forward", "backward"):
        segments.append(SegmentRecord(phase=phase, block=None, live_bytes=live, peak_bytes=saved // 2, duration_ms=4.0))
    for n in reversed(range(n_blocks)):
        segments += [
            SegmentRecord(
                phase="backward", block=n, live_bytes=live, peak_bytes=saved + saved // 4, duration_ms=3 * ms
            ),
            SegmentRecord(phase="backward", block=None, live_bytes=live - saved // 16, peak_bytes=0, duration_ms=0.5),
        ]
        live -= saved // 16
    return ModelProfile(
        model="M",
        dtype="bfloat16",
        device="cuda",
        batch_shapes={"ids": (8, 128)},
        tokens=1024,
        buffer_bytes=0,
        parameters=tuple(ParameterRecord(name=f"p{n}", shape=(elements,), group=0) for n in range(n_blocks + 2)),
        units=tuple(
            UnitRecord(name=f"u{n}", block=n - 1 if 0 < n <= n_blocks else None, parameters=(n,))
            for n in range(n_blocks + 2)
        ),
        calls=tuple(range(n_blocks + 2)),
        blocks=blocks,
        segments=tuple(segments),
    )


def machine(device: int | str, host: int | str, **changes: Any) -> HardwareProfile:
    """An H100 with that much memory."""
    return replace(
        H100,
        contention=(),
        device_bytes=parse_memory(device, name="device"),
        host_bytes=parse_memory(host, name="host"),
        **changes,
    )


def test_with_room_for_all_nothing_is_moved() -> None:
    traced = make_profile()
    hardware = machine("80GiB", "100GiB", flatten_gbps=3000.0, device_adam_gparams=100.0)
    plan = search(traced, hardware)
    assert plan.n_persist == plan.n_chunks
    assert (plan.n_buffer, plan.n_swap, plan.n_ckpt) == (0, 0, 0)
    compute = sum(segment.duration_ms for segment in traced.segments) - 6 * 20.0  # but no recomputation
    flatten = 2 * 2 * traced.n_trainable / 3000e6
    assert plan.step_ms == pytest.approx(compute + flatten + traced.n_trainable / 100e6, rel=1e-6)


@pytest.mark.parametrize(("device_gparams", "stays"), [(60.0, True), (2.0, False)])
def test_what_fits_stays_unless_moving_saves_much(device_gparams: float, stays: bool) -> None:
    """The host saves 3% of a step where it updates slowly beside the device, and half of it where it does not."""
    traced = make_profile(ms=1.0, elements=64 * MIB)
    hardware = machine("80GiB", "100GiB", device_adam_gparams=device_gparams, host_adam_gparams=4.0)
    plan = search(traced, hardware)
    resident = evaluate(traced, hardware, n_persist=plan.n_chunks, n_buffer=0, n_swap=0, n_ckpt=0)
    tight = replace(hardware, device_bytes=resident.device_bytes - 1)
    moving = search(traced, tight)
    assert moving.step_ms < resident.step_ms
    assert (plan.n_persist == plan.n_chunks) is stays
    assert stays is (moving.step_ms > 0.95 * resident.step_ms)


@pytest.mark.parametrize(("device", "kind"), [("1.5GiB", "cuda"), ("4GiB", "cpu")])
def test_no_plan_by_hand_is_better(device: str, kind: str) -> None:
    traced = replace(make_profile(4), device=kind)
    hardware = machine(device, "3GiB", device_type=kind)
    found = search(traced, hardware)
    n_chunks = found.n_chunks
    best = float("inf")
    feasible = 0
    for n_persist in range(n_chunks + 1):
        for n_buffer in range(n_chunks - n_persist + 1):
            for n_swap in range(5):
                for n_ckpt in range(5 - n_swap):
                    counts: dict[str, Any] = {
                        "n_persist": n_persist,
                        "n_buffer": n_buffer,
                        "n_swap": n_swap,
                        "n_ckpt": n_ckpt,
                    }
                    try:
                        plan = evaluate(traced, hardware, **counts, chunk_elements=found.chunk_elements)
                    except ValueError:  # PlanError is one
                        continue
                    feasible += 1
                    best = min(best, plan.step_ms)
                    assert plan.device_bytes <= hardware.device_bytes
                    assert plan.host_bytes <= hardware.host_bytes
    assert feasible > 10
    assert found.step_ms <= 1.01 * best
    assert best <= found.step_ms or found.n_ckpt_swap or found.n_speculate, "plans by hand have neither"
    assert found.device_bytes <= hardware.device_bytes


def test_more_memory_never_makes_it_slower() -> None:
    traced = make_profile(8)
    slow_host = {"host_adam_gparams": 0.14}
    for helped in (None, 3.4):  # with a device that helps it, a slow host matters less
        plans = [
            search(traced, machine(n * 256 * MIB, "4GiB", streamed_adam_gparams=helped, **slow_host))
            for n in (4, 8, 16, 28)
        ]
        times = [plan.step_ms for plan in plans]
        assert all(more <= 1.01 * less for less, more in pairwise(times))
        assert times[0] > (1.0 if helped else 1.1) * times[-1]
        assert any(plan.stream for plan in plans) == bool(helped)


@pytest.mark.parametrize("host_adam_gparams", [0.5, 0.8])
def test_more_host_memory_never_makes_it_slower(host_adam_gparams: float) -> None:
    traced = make_profile(12, ms=2.0)
    rates = {"host_adam_gparams": host_adam_gparams, "streamed_adam_gparams": None}
    plans = [search(traced, machine("1200MiB", n * 512 * MIB, **rates)) for n in (3, 6, 11)]
    # Whole updates are preferred to weight-only updates that gain less than 1% on the slower host.
    assert all(more.step_ms <= (1.02 if less.n_weight_only else 1.01) * less.step_ms for less, more in pairwise(plans))
    assert plans[-1].step_ms < 0.95 * plans[0].step_ms
    assert plans[0].n_weight_only == plans[0].n_speculate > 0
    assert plans[-1].n_weight_only < plans[-1].n_speculate


def test_the_device_helps_a_host_that_forward_waits_for() -> None:
    traced = make_profile(12, ms=2.0)
    tight = {"host_adam_gparams": 0.3, "streamed_adam_gparams": 0.3}
    alone = search(traced, machine("1200MiB", "3GiB", **{**tight, "streamed_adam_gparams": None}))
    plan = search(traced, machine("1200MiB", "3GiB", **tight))
    assert plan.stream
    assert not alone.stream
    assert plan.step_ms < 0.85 * alone.step_ms
    # One that is in time or that the link slows down too much gets no help, and on a CPU there is none to give.
    for changes in (
        {**tight, "host_adam_gparams": 100.0},
        {**tight, "streamed_adam_gparams": 0.001},
        {**tight, "device_type": "cpu"},
    ):
        hardware = machine("1200MiB", "3GiB", **changes)
        found = search(traced, hardware)
        assert found.stream is (hardware.device_type == "cuda")
        assert (
            predict(traced, hardware, found).step_ms == predict(traced, hardware, replace(found, stream=False)).step_ms
        )


def test_states_on_their_way_through_the_device_have_room_there() -> None:
    traced = make_profile(12, ms=2.0)
    options = {"host_adam_gparams": 0.3, "streamed_adam_gparams": 0.3}
    for limit in (1100, 2300, 3100):
        hardware = machine(limit * MIB, "4GiB", **options)
        plan = search(traced, hardware)
        assert plan.stream
        without = predict(traced, hardware, replace(plan, stream=False))
        assert without.device_bytes + 128 * MIB == plan.device_bytes <= hardware.device_bytes


def test_a_fast_link_and_slow_blocks_make_swapping_win() -> None:
    traced = make_profile(6, ms=200.0)
    tight = machine("2200MiB", "20GiB", h2d_gbps=500.0, d2h_gbps=500.0, bidirectional_gbps=1000.0)
    assert search(traced, tight).n_swap > 0
    slow = machine("2200MiB", "20GiB", h2d_gbps=0.5, d2h_gbps=0.5, bidirectional_gbps=1.0)
    assert search(traced, slow).n_swap == 0


def test_sixty_blocks_are_searched_in_no_time() -> None:
    traced = make_profile(60)
    search(traced, machine("4GiB", "20GiB"))
    start = time.process_time()
    search(traced, machine("6GiB", "20GiB"))
    assert time.process_time() - start < 3.0  # 0.1 s on an idle core


def test_of_forty_billion_parameters_few_plans_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Run] = []

    def count(*args: Any) -> Run:
        simulated.append(simulate(*args))
        return simulated[-1]

    monkeypatch.setattr(sys.modules["protrain.planning.predict"], "simulate", count)
    # Blocks as of GPT-2 40 B with 4 x 1,024 tokens.
    traced = make_profile(50, elements=768 * MIB, saved=1729 * MIB, ms=13.0)
    plan = search(traced, machine("80GiB", "700GiB"))
    assert 0 < plan.n_persist < plan.n_chunks
    assert plan.n_speculate > 0
    assert 0 < len(simulated) < 1200


def test_swapped_blocks_lie_early_with_checkpointed_ones_between() -> None:
    assert block_modes(6, 2, 3) == (SWAP, CKPT, SWAP, CKPT, CKPT, NONE)
    assert block_modes(4, 3, 1) == (SWAP, CKPT, SWAP, SWAP)
    assert block_modes(0, 0, 0) == ()
    with pytest.raises(ValueError, match=r"n_swap=2 and n_ckpt=3 .* 4 blocks"):
        block_modes(4, 2, 3)


def _counts(**changes: int) -> dict[str, Any]:
    return {"n_persist": 2, "n_buffer": 2, "n_swap": 0, "n_ckpt": 6, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_persist": 9}, "n_persist must be 0 to 8, not 9: all chunks are persistent"),
        ({"n_persist": -1}, "n_persist must be"),
        ({"n_buffer": 0}, "n_buffer must be 1 to 6, not 0: a unit holds up to 1"),
        ({"n_buffer": 7}, "not 7"),
        ({"n_swap": 1}, "n_swap must be 0 to 0, not 1: every block is swapped or checkpointed"),
        ({"n_ckpt_swap": 7}, "n_ckpt_swap must be 0 to 6, not 7: the inputs of every recomputed block"),
        ({"n_ckpt_swap": -1}, "not -1"),
    ],
)
def test_counts_out_of_range_are_named(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(make_profile(), machine("8GiB", "8GiB"), **_counts(**changes), chunk_elements=8 * MIB)


def test_infeasible_on_the_device_names_a_batch_and_memory_that_fit() -> None:
    traced = make_profile(6, saved=2048 * MIB)
    with pytest.raises(PlanError) as raised:
        search(traced, machine("2GiB", "8GiB"))
    error = raised.value
    assert error.where == "GPU"
    assert error.available_bytes == 2 * 1024 * MIB
    assert error.largest_part.startswith("activations")
    text = str(error)
    assert "a batch of " in text
    assert "instead of 8 fits" in text
    assert "Host memory: needed" in text
    # What it promises holds.
    enough = text.split("device_memory of at least ")[1].split(" ")[0]
    assert search(traced, machine(enough, "8GiB")).device_bytes == pytest.approx(error.needed_bytes, rel=0.2)
    batch = int(text.split("a batch of ")[1].split(" ")[0])
    assert 1 <= batch < 8
    smaller = make_profile(6, saved=2048 * MIB * batch // 8)
    assert search(smaller, machine("2GiB", "8GiB")).device_bytes <= 2 * 1024 * MIB
    with pytest.raises(PlanError):
        search(make_profile(6, saved=2048 * MIB * (batch + 1) // 8), machine("2GiB", "8GiB"))


def test_infeasible_model_states_do_not_blame_the_batch() -> None:
    traced = make_profile(6, saved=MIB, elements=512 * MIB)
    with pytest.raises(PlanError) as raised:
        search(traced, machine("2GiB", "80GiB"))
    assert "a batch of" not in str(raised.value)
    assert "chunk" in raised.value.largest_part or "staging" in raised.value.largest_part


def test_infeasible_on_the_host_names_the_host_memory_that_fits() -> None:
    traced = make_profile(6, elements=64 * MIB)
    with pytest.raises(PlanError) as raised:
        search(traced, machine("3GiB", "1GiB"))
    assert raised.value.where == "host"
    enough = str(raised.value).split("host_memory of at least ")[1].split(" ")[0]
    plan = search(traced, machine("3GiB", enough))
    assert plan.host_bytes <= parse_memory(enough, name="host")


def test_a_plan_survives_its_file_and_is_checked(tmp_path: Path) -> None:
    traced, hardware = make_profile(), machine("3GiB", "3GiB")
    plan = search(traced, hardware)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert check(loaded, traced, hardware) == plan


@pytest.mark.parametrize("name", ["n_ckpt_swap", "n_speculate", "stream"])
def test_a_plan_from_before_there_was_a_field_uses_nothing_of_it(name: str) -> None:
    traced, hardware = make_profile(), machine("3GiB", "3GiB")
    facts = evaluate(traced, hardware, **_counts(), chunk_elements=8 * MIB).to_dict()
    del facts[name]
    loaded = Plan.from_dict(facts)
    assert not getattr(loaded, name)
    assert not getattr(check(loaded, traced, hardware), name)


def test_check_refuses_what_does_not_belong() -> None:
    traced, hardware = make_profile(), machine("3GiB", "3GiB")
    plan = search(traced, hardware)
    other = replace(traced, parameters=(replace(traced.parameters[0], group=1), *traced.parameters[1:]))
    with pytest.raises(ValueError, match="made for another model"):
        check(plan, other, hardware)
    with pytest.raises(ValueError, match="n_chunks=99"):
        check(replace(plan, n_chunks=99), traced, hardware)
    with pytest.raises(ValueError, match="block_modes name 1 blocks"):
        check(replace(plan, block_modes=(NONE,)), traced, hardware)
    moved = evaluate(traced, hardware, **_counts(n_ckpt_swap=3), chunk_elements=8 * MIB)
    assert check(moved, traced, hardware) == moved
    with pytest.raises(ValueError, match=r"6 checkpointed, 3 of these with offloaded inputs; .* n_ckpt_swap=2"):
        check(replace(moved, n_ckpt_swap=2), traced, hardware)
    with pytest.raises(PlanError, match="GPU"):
        check(plan, traced, machine("1GiB", "3GiB"))
    with pytest.raises(PlanError, match="host"):
        check(plan, traced, machine("3GiB", "64MiB"))


def test_check_accounts_for_the_batch_at_hand() -> None:
    traced, hardware = make_profile(), machine("3GiB", "3GiB")
    plan = search(traced, hardware)
    larger = replace(make_profile(saved=3 * 400 * MIB), tokens=3072)
    with pytest.raises(PlanError):
        check(plan, larger, hardware)
    roomy = check(plan, larger, machine("20GiB", "3GiB"))
    assert roomy.tokens == 3072
    assert roomy.device_bytes > plan.device_bytes


def test_the_fingerprint_is_of_the_model_not_of_the_run() -> None:
    traced = make_profile()
    assert fingerprint(traced) == fingerprint(make_profile(saved=7, ms=3.0))
    assert fingerprint(traced) != fingerprint(replace(traced, dtype="float16"))
    assert fingerprint(traced) != fingerprint(make_profile(5))


def test_a_small_model_has_several_chunks_and_every_plan_is_possible(
    tiny_model: Callable[..., Any], tiny_batch: Callable[..., Any]
) -> None:
    traced = profile(tiny_model("llama"), tiny_batch())
    assert len(pack(traced).chunks) >= 4
    everything = replace(H100, device_type="cpu", device_bytes=64 * MIB, host_bytes=64 * MIB)
    most = search(traced, everything)
    assert most.n_persist == most.n_chunks
    least = search(traced, replace(everything, device_bytes=most.device_bytes - 1))
    assert least.n_persist < least.n_chunks or least.n_ckpt + least.n_swap > 0
