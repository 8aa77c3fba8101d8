"""Rates: of a host shared by ranks, of lanes beside each other, of updates, and of a device that is not at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.hardware.profile import Contention, HardwareProfile
from protrain.planning.contention import shares_kept, slowdowns
from protrain.planning.rates import (
    ComputeTimes,
    choose_packed,
    compute_times,
    device_update_gparams,
    host_update_gparams,
    moved_bytes,
    read_bytes,
    slower_share,
    written_bytes,
)
from protrain.planning.timeline import DOWN, GPU, HOST, REDUCE, STREAM, UP
from protrain.profiler.model_profile import ParameterRecord, UnitRecord
from tests.planning.models import H100, MACHINE, MIB, chain, make_profile


def left(hardware: HardwareProfile, lane: int, other: int) -> float:
    """The share of its rate that ``lane`` keeps beside another lane. The host's updates move 130 GB/s alone."""
    return float(shares_kept(hardware, 130.0, (42.0, 36.0))[lane, other])


LINK = replace(
    H100,
    h2d_gbps=50.0,
    d2h_gbps=50.0,
    bidirectional_gbps=80.0,
    host_dram_gbps=160.0,
    host_adam_gparams=5.0,
    contention=(),
)


def test_shared_ceilings() -> None:
    assert left(LINK, UP, UP) == left(LINK, GPU, HOST) == left(LINK, HOST, GPU) == left(LINK, GPU, UP) == 1.0
    assert left(LINK, UP, DOWN) == left(LINK, DOWN, UP) == pytest.approx(0.8)
    assert left(LINK, HOST, UP) == pytest.approx(110 / 130)
    assert left(LINK, DOWN, HOST) == pytest.approx(160 / 180)
    assert left(replace(LINK, host_dram_gbps=60.0), HOST, UP) == 0.25, "something is always left"
    # 40 GB/s a direction, of which uploads want 50 and streamed states 42.
    assert left(LINK, STREAM, UP) == left(LINK, UP, STREAM) == pytest.approx(40 / 92)
    assert left(LINK, DOWN, STREAM) == pytest.approx(40 / 86)


def test_measured_pairs_take_their_place() -> None:
    groups = {("h2d", "d2h"): (0.9, 0.95), ("h2d", "host_adam"): (0.6, 0.7), ("host_adam", "matmul"): (0.8, 1.02)}
    pairs = [Contention(activities=names, shares=shares) for names, shares in groups.items()]
    all_four = Contention(activities=("h2d", "d2h", "host_adam", "matmul"), shares=(0.5, 0.5, 0.5, 0.5))
    measured = replace(LINK, contention=(*pairs, all_four))
    assert [left(measured, UP, other) for other in (DOWN, HOST, GPU)] == [0.9, 0.6, 1.0], "groups of more are not read"
    assert left(measured, HOST, UP) == 0.7
    assert left(measured, HOST, GPU) == 0.8
    assert left(measured, GPU, HOST) == 1.0, "never more than the rate alone"
    two = replace(measured, world_size=2)
    assert left(two, UP, HOST) == pytest.approx(1 - 0.8 * 0.4), "ranks lose less in a step than in calibration"


def test_beside_several_lanes_an_operation_keeps_the_product_of_the_shares() -> None:
    """A layer of 10 ms, with an upload in its first half and the host's update in 4 of its milliseconds."""
    shares = shares_kept(LINK, 130.0, (42.0, 36.0))
    shares[GPU, UP], shares[GPU, HOST] = 0.8, 0.5
    lanes = [GPU, GPU, UP, REDUCE, HOST]
    found = slowdowns(shares, lanes, [0.0, 10.0, 0.0, 3.0, 3.0], [10.0, 20.0, 5.0, 4.0, 7.0])
    assert found[:2] == pytest.approx([1 / (0.9 * 0.8), 1.0])
    assert found[2:4] == pytest.approx([1 / (1 - (1 - shares[UP, HOST]) * 2 / 5), 1.0])


def test_beside_copies_the_link_has_what_calibration_found_for_both_ways() -> None:
    both_ways = Contention(activities=("h2d", "d2h"), shares=(0.6, 0.86))
    streamed = Contention(activities=("streamed_adam", "host_adam"), shares=(0.87, 0.9))
    machine = replace(H100, h2d_gbps=54.0, d2h_gbps=54.0, bidirectional_gbps=94.0, contention=(both_ways, streamed))
    assert left(machine, UP, STREAM) == left(machine, STREAM, UP) == pytest.approx(0.6 * 54 / (54 + 42))
    assert left(machine, STREAM, HOST) == 0.87
    assert left(machine, HOST, STREAM) == 0.9


def test_plans_are_made_for_a_slower_host_except_where_the_host_is_the_device() -> None:
    assert slower_share(H100) == 0.87
    assert slower_share(replace(H100, device_type="cpu")) == 1.0


def test_bytes_are_those_of_the_kernels() -> None:
    """As ``protrain_kernels.adam`` and ``streamed_adam`` count them."""
    assert [moved_bytes(dtype) for dtype in ("bfloat16", "float16", "float32")] == [26, 28, 28]
    assert [moved_bytes(dtype, 2) for dtype in ("bfloat16", "float16", "float32")] == [18, 20, 20]
    assert (read_bytes("bfloat16"), written_bytes("bfloat16")) == (14, 12)
    assert (read_bytes("bfloat16", 2), written_bytes("bfloat16", 2)) == (10, 8)


def test_the_hosts_rate_is_the_calibrated_one_and_without_it_a_measured_share_of_it() -> None:
    usual = chain(3.0, 6.0)
    narrow = replace(usual, moment_dtype="bfloat16")
    calibrated = replace(H100, host_adam_gparams=5.0, host_adam_narrow_gparams=6.0, device_adam_gparams=100.0)
    counted = replace(calibrated, host_adam_narrow_gparams=None)
    for machine, bf16 in ((calibrated, 6.0), (counted, 1.2 * 5.0)):
        assert host_update_gparams(narrow, machine) == pytest.approx(bf16)
        in_fp16 = host_update_gparams(replace(narrow, dtype="float16"), machine)
        assert in_fp16 == pytest.approx(bf16 * 18 / 26 * 28 / 20)
        assert host_update_gparams(usual, machine) == 5.0
        assert device_update_gparams(narrow, machine) == pytest.approx(100.0 * 26 / 18)
        assert device_update_gparams(usual, machine) == 100.0


def test_times_of_another_device_are_estimated() -> None:
    profile = replace(chain(3.0, 6.0), device="meta")
    machine = replace(MACHINE, device_copy_gbps=3000.0, matmul_tflops=500.0)

    def times(**changes: Any) -> ComputeTimes:
        blocks = tuple(replace(block, **changes) for block in profile.blocks)
        return compute_times(replace(profile, blocks=blocks, compiled=compiled), machine)

    compiled = False
    products, traffic = times(forward_flops=10**13), times(forward_flops=0, forward_traffic_bytes=3 * 10**9)
    assert products.forward[0] == pytest.approx(0.86 * 20.0)
    assert traffic.forward[0] == pytest.approx(1.37 * 1.0)
    both = times(forward_flops=10**13, forward_traffic_bytes=3 * 10**9)
    assert both.forward[0] == pytest.approx(products.forward[0] + traffic.forward[0])
    assert both.backward[0] == pytest.approx(2.2 * both.forward[0])
    assert both.recompute[0] == pytest.approx(0.85 * both.forward[0])
    attending = {"forward_flops": 10**13, "attention_flops": 4 * 10**12}
    assert times(**attending).forward[0] == pytest.approx(0.86 * 12.0 + 1.36 * 8.0)
    assert times(**attending).recompute[0] == pytest.approx(0.85 * (0.86 * 12.0 + 1.36 * 8.0))
    assert times(**attending, recomputes_attention=False).recompute[0] == pytest.approx(0.85 * 0.86 * 12.0)
    compiled = True
    assert times(forward_flops=10**13).recompute[0] == pytest.approx(products.forward[0])
    assert compute_times(replace(profile, device="cuda"), machine).forward == (3.0,) * 4


@pytest.mark.parametrize(("words", "share"), [(50304, 1.6), (50257, 6.0)])
def test_a_head_of_odd_width_takes_long(words: int, share: float) -> None:
    """One that is tied to the embedding here, for each of its three products."""
    profile = chain(3.0, 6.0, n=2)
    outer = (
        ParameterRecord(name="embed", shape=(words, 64), group=0),
        ParameterRecord(name="positions", shape=(1024, 64), group=0),
    )
    unit = UnitRecord(name="", block=None, parameters=(2, 3))
    profile = replace(profile, device="meta", parameters=(*profile.parameters, *outer), units=(*profile.units, unit))
    found = compute_times(profile, MACHINE)
    product_ms = 2 * profile.tokens * words * 64 / MACHINE.matmul_tflops / 1e9
    assert (found.gap_forward[-1], found.gap_backward[-1]) == pytest.approx(
        (share * product_ms, 2 * share * product_ms)
    )
    chunked = compute_times(replace(profile, chunked_loss=True), MACHINE)  # its rows are made wider
    assert chunked.gap_forward[-1] == pytest.approx(3 * 1.06 * product_ms)


@pytest.mark.parametrize(
    ("saved", "tensors", "packed"),
    [
        (913 * MIB, 25, False),  # LLaMA-2 13B, 4 x 1024: large tensors, no masks
        (228 * MIB, 25, True),  # the same of one sequence: small ones, of which the begin counts
        (961 * MIB, 23, False),  # GPT-2 10B, 4 x 1024
        (16 * MIB, 25, True),
        (400 * MIB, 1, False),
    ],
)
def test_blocks_of_published_models_on_an_h100(saved: int, tensors: int, packed: bool) -> None:
    profile = make_profile(4, saved=saved, ms=0.5)
    profile = replace(profile, blocks=tuple(replace(block, saved_tensors=tensors) for block in profile.blocks))
    assert choose_packed(profile, H100) == ((True,) * 4 if packed else ())
