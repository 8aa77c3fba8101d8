"""The search offloads inputs where that pays, and the error that nothing fits takes it into account."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, block_modes, check, evaluate, pack, search
from protrain.profiler.model_profile import ModelProfile
from tests.planning.test_search import MIB, machine, make_profile

NONE, CKPT, SWAP, CKPT_SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP, BlockMode.CKPT_SWAP
# Inputs of 256 MiB, 4 GiB in all, beside 8 GiB of states; 20 ms a block give the link time for that and not for more.
LONG: dict[str, Any] = {"n_blocks": 16, "elements": 32 * MIB, "saved": 4096 * MIB, "ms": 20.0}


def kept_ms(traced: ModelProfile, hardware: HardwareProfile, chunk_elements: int) -> float:
    """The step time of the fastest plan by hand that offloads no inputs and swaps nothing."""
    n_blocks, n_chunks = len(traced.blocks), len(pack(traced, chunk_elements).chunks)
    best = float("inf")
    for n_persist in range(n_chunks + 1):
        for n_ckpt in range(n_blocks + 1):
            for n_buffer in range(min(2, n_chunks - n_persist), n_chunks - n_persist + 1):
                counts: dict[str, Any] = {"n_persist": n_persist, "n_buffer": n_buffer, "n_swap": 0, "n_ckpt": n_ckpt}
                try:
                    plan = evaluate(traced, hardware, **counts, chunk_elements=chunk_elements)
                except PlanError:
                    break
                best = min(best, plan.step_ms)
    return best


@pytest.mark.slow
def test_inputs_of_a_long_sequence_make_room_for_untouched_blocks() -> None:
    traced, hardware = make_profile(**LONG), machine("10GiB", "40GiB")
    plan = search(traced, hardware)
    assert plan.n_ckpt_swap > 0
    assert plan.n_swap == 0
    assert plan.block_modes == block_modes(16, 0, plan.n_ckpt, plan.n_ckpt_swap)
    assert plan.host_bytes > plan.n_ckpt_swap * 256 * MIB
    assert plan.step_ms < 0.98 * kept_ms(traced, hardware, plan.chunk_elements)


def test_inputs_stay_on_the_device_where_there_is_room_or_the_link_is_slow() -> None:
    traced = make_profile(**LONG)
    assert search(traced, machine("200GiB", "40GiB")).n_ckpt_swap == 0  # everything fits
    slow = {"h2d_gbps": 0.1, "d2h_gbps": 0.1, "bidirectional_gbps": 0.2}
    assert search(traced, machine("12GiB", "40GiB", **slow)).n_ckpt_swap == 0  # each takes longer than a block


@pytest.mark.parametrize("device", ["8.25GiB", "11GiB", "26GiB"])
def test_no_more_inputs_are_offloaded_than_must_be(device: str) -> None:
    traced, hardware = make_profile(**LONG), machine(device, "40GiB")
    plan = search(traced, hardware)
    assert plan.n_ckpt_swap > 0
    options: dict[str, Any] = {"n_persist": plan.n_persist, "n_swap": 0, "n_ckpt": plan.n_ckpt}
    for fewer in range(plan.n_ckpt_swap):
        for n_buffer in range(1, plan.n_chunks - plan.n_persist + 1):
            try:
                by_hand = evaluate(traced, hardware, n_buffer=n_buffer, n_ckpt_swap=fewer, **options)
            except PlanError:
                break
            assert by_hand.step_ms >= plan.step_ms


def test_input_offload_makes_fit_what_else_would_not() -> None:
    traced = make_profile(**LONG)
    kept = evaluate(traced, machine("80GiB", "40GiB"), n_persist=0, n_buffer=1, n_swap=0, n_ckpt=16)
    tight = machine(kept.device_bytes - 1, "40GiB")
    plan = search(traced, tight)
    assert plan.n_ckpt_swap > 0
    assert plan.device_bytes < kept.device_bytes
    assert check(plan, traced, tight) == plan
    # With less memory that is not enough either. The error says what is needed with all inputs offloaded but those in
    # use.
    with pytest.raises(PlanError) as raised:
        search(traced, machine("4GiB", "40GiB"))
    least = raised.value.needed_bytes
    assert kept.device_bytes - 17 * 256 * MIB < least < kept.device_bytes - 13 * 256 * MIB
    found = search(traced, machine(least, "40GiB"))
    assert found.device_bytes == least
    with pytest.raises(PlanError):
        search(traced, machine(least - 1, "40GiB"))
    # A host that holds the states and little more has no room for inputs.
    with pytest.raises(PlanError) as raised:
        search(traced, machine(least, kept.host_bytes + 10 * 256 * MIB))
    assert raised.value.where == "host"
    assert raised.value.needed_bytes > kept.host_bytes + 10 * 256 * MIB


def test_the_first_recomputed_blocks_have_their_inputs_offloaded() -> None:
    assert block_modes(5, 0, 4, 2) == (CKPT_SWAP, CKPT_SWAP, CKPT, CKPT, NONE)
    assert block_modes(6, 2, 3, 2) == (SWAP, CKPT_SWAP, SWAP, CKPT_SWAP, CKPT, NONE)
    assert block_modes(4, 3, 1, 1) == (SWAP, CKPT_SWAP, SWAP, SWAP)
    with pytest.raises(ValueError, match="n_ckpt_swap must be 0 to 3, the number of recomputed blocks, not 4"):
        block_modes(6, 0, 3, 4)


def test_no_other_blocks_with_offloaded_inputs_leave_more_memory() -> None:
    traced, hardware = make_profile(6), machine("20GiB", "20GiB")
    memory = MemoryModel(traced, hardware, pack(traced, 8 * MIB))
    for n_ckpt, n_ckpt_swap in ((6, 3), (4, 2), (5, 4)):
        base = block_modes(6, 0, n_ckpt)
        least = memory.activations(block_modes(6, 0, n_ckpt, n_ckpt_swap)).peak_bytes
        for away in combinations(range(n_ckpt), n_ckpt_swap):
            modes = tuple(CKPT_SWAP if at in away else mode for at, mode in enumerate(base))
            assert least <= memory.activations(modes).peak_bytes
