"""A plan with input offload, made by hand: what it takes on the device, on the host and in time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import protrain
from bench.planner.paper import paper_step_ms
from protrain.hardware.detection import detect
from protrain.planning import BlockMode, MemoryModel, RuntimeModel, check, evaluate, pack
from protrain.profiler.model_profile import ModelProfile
from tests.engine import residual
from tests.planning.counts import placed

ROWS, WIDTH, DEPTH = 256, 32, 8
INPUT_BYTES = ROWS * WIDTH * 4
NONE, CKPT, SWAP, CKPT_SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP, BlockMode.CKPT_SWAP
host = partial(detect, "cpu", device_memory="1GiB", host_memory="1GiB")


@pytest.fixture(scope="module")
def traced() -> ModelProfile:
    return protrain.profile(residual.make(WIDTH, DEPTH), (torch.randn(ROWS, 8),), device="cpu")


def memory_of(traced: ModelProfile) -> MemoryModel:
    return MemoryModel(traced, host(), pack(traced))


def test_inputs_leave_the_device_for_the_host(traced: ModelProfile) -> None:
    memory = memory_of(traced)
    assert {block.input_bytes for block in traced.blocks} == {INPUT_BYTES}
    kept, moved = memory.activations((CKPT,) * DEPTH), memory.activations((CKPT_SWAP,) * DEPTH)
    # In its own backward a block's input is there, and that of the one before is on its way.
    assert kept.peak_bytes - moved.peak_bytes == (DEPTH - 2) * INPUT_BYTES
    assert kept.held_bytes - moved.held_bytes == (DEPTH - 2) * INPUT_BYTES
    assert kept.swapped_bytes == 0
    assert DEPTH * INPUT_BYTES <= moved.swapped_bytes <= DEPTH * (INPUT_BYTES + 16384)


@pytest.mark.parametrize("away", range(DEPTH - 1))
def test_each_input_counts_for_itself(traced: ModelProfile, away: int) -> None:
    memory = memory_of(traced)
    modes = tuple(CKPT_SWAP if block == away else CKPT for block in range(DEPTH))
    # The peak is where all inputs are: in the backward of the last block, while the one before is fetched.
    fell = memory.activations((CKPT,) * DEPTH).peak_bytes - memory.activations(modes).peak_bytes
    assert fell == (INPUT_BYTES if away < DEPTH - 2 else 0)


def test_an_input_that_needs_no_gradient_is_not_offloaded() -> None:
    model = residual.make(WIDTH, DEPTH)
    model.get_submodule("enter").requires_grad_(False)
    found = protrain.profile(model, (torch.randn(ROWS, 8),), device="cpu")
    assert [block.input_bytes for block in found.blocks] == [0, *[INPUT_BYTES] * (DEPTH - 1)]
    bare = nn.Sequential(*[residual.Block(WIDTH) for _ in range(3)])
    found = protrain.profile(bare, (torch.randn(ROWS, WIDTH),), device="cpu")
    assert [block.input_bytes for block in found.blocks] == [0, INPUT_BYTES, INPUT_BYTES]


def test_time_is_that_of_recomputation_and_of_the_way_out_and_back(traced: ModelProfile) -> None:
    hardware = host()
    layout = pack(traced)
    runtime, n_chunks = RuntimeModel(MemoryModel(traced, hardware, layout)), len(layout.chunks)
    step_ms = {mode: runtime.step_ms((mode,) * DEPTH, placed(n_chunks, 0)) for mode in (NONE, CKPT, CKPT_SWAP)}
    way_ms = DEPTH * INPUT_BYTES * (1 / hardware.d2h_gbps + 1 / hardware.h2d_gbps) / 1e6
    assert step_ms[CKPT] > step_ms[NONE]
    assert step_ms[CKPT_SWAP] == pytest.approx(step_ms[CKPT] + way_ms)  # a CPU does one thing after the other
    gpu = replace(hardware, device_type="cuda")
    timeline = RuntimeModel(MemoryModel(traced, gpu, layout)).timeline((CKPT_SWAP,) * DEPTH, placed(n_chunks, 0))
    copies = [operation for operation in timeline.operations if operation.name.startswith("activations")]
    assert len(copies) == 2 * DEPTH


def test_a_plan_made_by_hand_is_checked(traced: ModelProfile) -> None:
    hardware = host()
    base = evaluate(traced, hardware, n_persist=0, n_buffer=1, n_swap=0, n_ckpt=DEPTH)
    modes = (CKPT_SWAP,) * (DEPTH - 1) + (CKPT,)
    plan = check(replace(base, n_ckpt_swap=DEPTH - 1, block_modes=modes), traced, hardware)
    assert plan.block_modes == modes
    assert plan.device_bytes < base.device_bytes - (DEPTH - 3) * INPUT_BYTES
    assert plan.host_bytes >= base.host_bytes + (DEPTH - 1) * INPUT_BYTES
    assert plan.step_ms > base.step_ms
    layout = pack(traced, plan.chunk_elements)
    assert paper_step_ms(plan, traced, hardware, layout) == paper_step_ms(base, traced, hardware, layout)
    with pytest.raises(
        ValueError, match=rf"{DEPTH} checkpointed, {DEPTH - 1} of these with offloaded inputs; .* n_ckpt_swap=0"
    ):
        check(replace(base, block_modes=modes), traced, hardware)
