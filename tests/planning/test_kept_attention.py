"""Attention kept by recomputed blocks: when it is chosen, and what it takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, Plan, evaluate, search
from protrain.planning.plan import as_planned
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import CLOSE, MIB, N, as_measured, check_search, random_machine, random_profile

pytestmark = pytest.mark.usefixtures("judged_as_calibrated")
# Some cases keep attention and others do not; all have few enough plans to try every one.
SEEDS = (31, 37, 52)


def with_attention(profile: ModelProfile, share: float, part: int) -> ModelProfile:
    """Attention takes ``share`` of every block's recomputation and leaves one of ``part`` parts of what it saves."""
    blocks = []
    for block in profile.blocks:
        attention_ms = share * block.recompute_ms
        blocks.append(replace(block, attention_ms=attention_ms, attention_bytes=block.saved_bytes // part))
    return replace(profile, blocks=tuple(blocks))


def cases() -> Iterator[tuple[ModelProfile, HardwareProfile, bool]]:
    for seed in SEEDS:
        draw = random.Random(seed)
        profile = as_measured(random_profile(draw, 16), draw)
        hardware, inside = random_machine(draw), draw.random() < 0.25
        hardware = replace(
            hardware, device_bytes=max(hardware.device_bytes, 1200 * MIB), host_bytes=hardware.host_bytes + 800 * MIB
        )
        yield with_attention(profile, draw.choice([0.1, 0.3, 0.6]), draw.choice([8, 16])), hardware, inside


def test_no_plan_is_better_and_attention_is_kept_where_that_gains() -> None:
    chosen = []
    for profile, hardware, inside in cases():
        found = check_search(profile, hardware, inside=inside)
        without = search(profile, hardware, chunk_elements=N, step_during_backward=inside, without=("keep_attention",))
        assert not without.keep_attention
        if found.keep_attention:
            assert found.step_ms < 0.99 * without.step_ms
        else:
            assert found.step_ms <= CLOSE * without.step_ms
        chosen.append(found.keep_attention)
    assert len(set(chosen)) == 2, "some cases keep attention and others do not"


def plans(profile: ModelProfile, hardware: HardwareProfile, n_ckpt: int, n_ckpt_swap: int) -> list[Plan]:
    """Two plans of the same counts, without and with attention kept."""
    return [
        evaluate(
            profile,
            hardware,
            n_persist=0,
            n_buffer=2,
            n_swap=0,
            n_ckpt=n_ckpt,
            n_ckpt_swap=n_ckpt_swap,
            keep_attention=keep,
            chunk_elements=N,
        )
        for keep in (False, True)
    ]


def test_what_it_takes_and_saves() -> None:
    draw = random.Random(3)
    profile = random_profile(draw, 16)
    equal = [replace(profile.blocks[0], name=block.name) for block in profile.blocks]
    profile = with_attention(replace(profile, blocks=tuple(equal)), 0.5, 8)
    block, n_blocks = profile.blocks[0], len(profile.blocks)
    hardware = replace(random_machine(draw), device_bytes=10**12, host_bytes=10**12)
    hardware = replace(hardware, h2d_gbps=1e4, d2h_gbps=1e4, bidirectional_gbps=2e4, host_adam_gparams=1e4)
    attention = block.attention_bytes
    for n_ckpt in (n_blocks, n_blocks - 1, 1):
        without, kept = plans(profile, hardware, n_ckpt, 0)
        assert without.step_ms - kept.step_ms == pytest.approx(n_ckpt * block.attention_ms, rel=0.02)
        # The peak is in the first backward, which computes one of them anew; untouched blocks save them anyway.
        more = (kept.device_bytes - without.device_bytes) / 1.01
        assert (n_ckpt - 1) * attention <= more * 1.02
        assert more <= (n_ckpt + 1) * attention
        assert kept.host_bytes == without.host_bytes
    without, kept = plans(profile, hardware, n_blocks, n_blocks)
    assert kept.host_bytes - without.host_bytes == n_blocks * attention
    assert kept.device_bytes - without.device_bytes <= 3 * attention
    without, kept = plans(profile, hardware, 0, 0)
    assert (kept.step_ms, kept.host_bytes) == (without.step_ms, without.host_bytes)
    assert 0 <= kept.device_bytes - without.device_bytes <= 1.02 * attention


def test_a_plan_says_so_and_comes_back_from_a_file() -> None:
    profile, hardware, _ = next(cases())
    plan = plans(profile, replace(hardware, device_bytes=10**12, host_bytes=10**12), 2, 1)[1]
    assert "keep_attention" in str(plan)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert as_planned(profile, plan) == profile.keeping_attention()
    assert as_planned(profile, replace(plan, keep_attention=False)) is profile
    assert plan.block_modes.count(BlockMode.CKPT_SWAP) == 1


def test_a_model_without_fused_attention_keeps_none() -> None:
    draw = random.Random(7)
    profile, hardware = random_profile(draw, 16), replace(random_machine(draw), device_bytes=2000 * MIB)
    assert profile.keeping_attention().segments == profile.segments
    plan = search(profile, hardware, chunk_elements=N)
    assert not plan.keep_attention
