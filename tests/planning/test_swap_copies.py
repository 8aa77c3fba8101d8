"""Whether a swapped block is packed: by the rates of the machine, and by what the block saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.planning import MemoryModel, RuntimeModel, evaluate, pack, search
from protrain.planning.plan import BlockMode
from protrain.planning.rates import COPY_MS, choose_packed, swap_copies
from protrain.profiler.model_profile import ModelProfile
from tests.planning.machines import H100
from tests.planning.test_search import make_profile

MIB = 1024**2
N_BLOCKS = 4


def profile_of(*, saved: int, tensors: int, ms: float = 0.5) -> ModelProfile:
    """Of blocks whose forward takes ``ms``, and their backward twice that."""
    profile = make_profile(N_BLOCKS, saved=saved, ms=ms)
    blocks = tuple(replace(block, saved_tensors=tensors) for block in profile.blocks)
    return replace(profile, blocks=blocks)


@pytest.mark.parametrize(
    ("saved", "tensors", "packed"),
    [
        (913 * MIB, 25, False),  # LLaMA-2 13B, 4 x 1024: large tensors
        (228 * MIB, 25, True),  # the same of one sequence: small ones, of which the begin counts
        (961 * MIB, 23, False),  # GPT-2 10B, 4 x 1024
        (16 * MIB, 25, True),
        (400 * MIB, 1, False),
    ],
)
def test_blocks_of_published_models_on_an_h100(saved: int, tensors: int, packed: bool) -> None:
    profile = profile_of(saved=saved, tensors=tensors)
    assert choose_packed(profile, H100) == ((True,) * N_BLOCKS if packed else ())


def test_a_slow_pack_or_a_fast_link_leave_direct_copies() -> None:
    profile = profile_of(saved=228 * MIB, tensors=25)
    assert choose_packed(profile, H100)
    assert not choose_packed(profile, replace(H100, pack_gbps=50.0))
    assert not choose_packed(profile, replace(H100, h2d_gbps=9000.0, d2h_gbps=9000.0, pack_gbps=100.0))
    assert choose_packed(profile, replace(H100, pack_gbps=None)) == choose_packed(profile, H100)


def test_copies_that_computing_hides_are_direct() -> None:
    assert choose_packed(profile_of(saved=228 * MIB, tensors=25, ms=0.5), H100)
    assert not choose_packed(profile_of(saved=228 * MIB, tensors=25, ms=30.0), H100)


def test_nothing_is_packed_on_a_cpu() -> None:
    assert choose_packed(profile_of(saved=MIB, tensors=30), replace(H100, device_type="cpu")) == ()


def test_what_either_takes() -> None:
    [block, *_] = profile_of(saved=80 * MIB, tensors=10).blocks
    hardware = replace(H100, d2h_gbps=50.0, h2d_gbps=25.0, pack_gbps=2000.0)
    direct, packed = (swap_copies(block, 2, hardware, packed=packed) for packed in (False, True))
    assert direct.out_ms == pytest.approx(40 * MIB / 50e6 + 5 * COPY_MS)
    assert direct.back_ms == pytest.approx(40 * MIB / 25e6 + 5 * COPY_MS)
    assert direct.pack_ms == 0.0
    assert packed.out_ms == pytest.approx(40 * MIB / 50e6 + COPY_MS)
    assert packed.back_ms == pytest.approx(40 * MIB / 25e6 + COPY_MS)
    assert packed.pack_ms == pytest.approx((40 + 40) * MIB / 2000e6)


def test_the_plan_carries_the_verdict_and_the_models_follow_it() -> None:
    profile = profile_of(saved=228 * MIB, tensors=25)
    plan = evaluate(profile, H100, n_persist=2, n_buffer=2, n_swap=2, n_ckpt=0)
    assert plan.pack_swaps == (True,) * N_BLOCKS
    assert search(profile, H100).pack_swaps == plan.pack_swaps
    layout = pack(profile)
    modes = (BlockMode.SWAP,) * N_BLOCKS
    found: dict[Any, Any] = {}
    for packs in ((), plan.pack_swaps, None):
        memory = MemoryModel(profile, H100, layout, pack_swaps=packs)
        found[packs] = RuntimeModel(memory).step_ms(modes, plan.counts), memory.activations(modes)
    assert found[None] == found[plan.pack_swaps]
    assert found[None][0] < found[()][0]
    assert found[None][1].peak_bytes > found[()][1].peak_bytes, "the buffer lies beside what is saved"
    assert found[None][1].swapped_bytes == found[()][1].swapped_bytes
