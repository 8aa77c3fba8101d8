"""The runtime model: the paper's sums, where they can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protrain.hardware import load
from protrain.planning import BlockMode, RuntimeModel, pack
from protrain.planning.runtime import compute_times
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord

NONE, CKPT, SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP
N = 1_280_000  # elements of a chunk: 2.56 MB of weights
MACHINE = replace(
    load("h100"),
    host_adam_gparams=1.28,
    device_adam_gparams=128.0,
    h2d_gbps=1.0,
    d2h_gbps=1.0,
    bidirectional_gbps=2.0,
    host_dram_gbps=1e6,
)
MOVE = 2.56  # ms: one chunk over the link
UPDATE = 1.0  # ms: one chunk on the host


def make_profile(forward: float, backward: float) -> ModelProfile:
    def segment(phase: str, block: int, duration: float) -> SegmentRecord:
        return SegmentRecord(phase=phase, block=block, live_bytes=0, peak_bytes=0, duration_ms=duration)

    return ModelProfile(
        model="M",
        dtype="bfloat16",
        device="cuda",
        batch_shapes={"x": (1,)},
        tokens=100,
        buffer_bytes=0,
        parameters=tuple(ParameterRecord(name=f"p{n}", shape=(N // 128, 128), group=0) for n in range(4)),
        units=tuple(UnitRecord(name=f"u{n}", block=n, parameters=(n,)) for n in range(4)),
        calls=(0, 1, 2, 3),
        blocks=tuple(
            BlockRecord(
                name=f"b{n}",
                saved_bytes=10_000_000,
                saved_tensors=1,
                forward_peak_bytes=0,
                input_bytes=0,
                output_bytes=0,
                forward_ms=forward,
                backward_ms=backward,
                forward_flops=10**9,
            )
            for n in range(4)
        ),
        segments=(
            *(segment("forward", n, forward) for n in range(4)),
            *(segment("backward", n, backward + forward) for n in reversed(range(4))),
        ),
    )


def step_ms(
    profile: ModelProfile, modes: tuple[BlockMode, ...], n_persist: int, n_buffer: int, *, spare: bool = True
) -> float:
    runtime = RuntimeModel(profile, MACHINE, pack(profile, N))
    return runtime.under(modes).step_ms(n_persist, n_buffer, spare_buffer=spare)


def test_everything_resident_is_computing_and_the_device_update() -> None:
    assert step_ms(make_profile(3.0, 6.0), (NONE,) * 4, 4, 0) == pytest.approx(4 * 9.0 + 4 * 0.01)


def test_checkpointing_adds_a_forward() -> None:
    profile = make_profile(3.0, 6.0)
    assert step_ms(profile, (CKPT, CKPT, NONE, NONE), 4, 0) - step_ms(profile, (NONE,) * 4, 4, 0) == pytest.approx(6.0)


def test_transfers_hide_under_slow_blocks_and_bound_fast_ones() -> None:
    assert step_ms(make_profile(3.0, 6.0), (NONE,) * 4, 0, 2) == pytest.approx(4 * 3.0 + 4 * 6.0)
    fast = step_ms(make_profile(0.1, 0.2), (NONE,) * 4, 0, 2)
    # Forward: every chunk up. Backward: every gradient down, two chunks still in a buffer, which changes nothing then.
    assert fast == pytest.approx(4 * MOVE + 4 * MOVE)


def test_without_a_spare_buffer_transfers_add() -> None:
    alone = step_ms(make_profile(3.0, 6.0), (NONE,) * 4, 0, 1, spare=False)
    assert alone == pytest.approx(4 * (3.0 + MOVE) + 3 * (6.0 + MOVE) + 6.0)


def test_the_host_update_stands_beside_forward() -> None:
    slow_host = replace(MACHINE, host_adam_gparams=0.0128)  # 100 ms a chunk
    profile = make_profile(3.0, 6.0)
    runtime = RuntimeModel(profile, slow_host, pack(profile, N))
    step = runtime.under((NONE,) * 4).step_ms(1, 2, spare_buffer=True)
    assert step == pytest.approx(4 * 6.0 + 0.01 + 300.0)


def test_host_dram_bounds_updates_and_uploads_together() -> None:
    slow_dram = replace(MACHINE, host_dram_gbps=0.1)
    profile = make_profile(3.0, 6.0)
    step = RuntimeModel(profile, slow_dram, pack(profile, N)).under((NONE,) * 4).step_ms(0, 2, spare_buffer=True)
    assert step == pytest.approx(4 * 6.0 + 4 * N * (26 + 2) / 0.1 / 1e6)


def test_swapping_takes_the_link() -> None:
    profile = make_profile(3.0, 6.0)
    swapped = step_ms(profile, (SWAP, NONE, NONE, NONE), 4, 0)
    # 10 MB each way at 1 GB/s, beside 3 ms of forward and 6 ms of backward.
    assert swapped - step_ms(profile, (NONE,) * 4, 4, 0) == pytest.approx((10.0 - 3.0) + (10.0 - 6.0))


def test_on_a_cpu_everything_adds() -> None:
    profile = replace(make_profile(3.0, 6.0), device="cpu")
    machine = replace(MACHINE, device_type="cpu")
    step = RuntimeModel(profile, machine, pack(profile, N)).under((NONE,) * 4).step_ms(0, 4, spare_buffer=True)
    assert step == pytest.approx(4 * 9.0 + 4 * MOVE + 4 * MOVE + 4 * UPDATE)


def test_times_of_another_device_are_estimated() -> None:
    profile = replace(make_profile(3.0, 6.0), device="meta")
    times = compute_times(profile, MACHINE)
    assert times.forward[0] == pytest.approx(3 * 10_000_000 / 3020e6)  # memory-bound
    heavy = replace(profile, blocks=tuple(replace(block, forward_flops=10**13) for block in profile.blocks))
    assert compute_times(heavy, MACHINE).forward[0] == pytest.approx(1e13 / (0.6 * 700e9))
    assert compute_times(heavy, MACHINE).backward[0] == pytest.approx(2 * compute_times(heavy, MACHINE).forward[0])
    assert compute_times(replace(profile, device="cuda"), MACHINE).forward == (3.0,) * 4
