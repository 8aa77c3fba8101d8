"""Updates with moments in bf16 take as much less time as they move less, wherever they are done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.planning import evaluate, predict, search
from protrain.planning.answer import host_gparams
from protrain.planning.rates import (
    device_update_gparams,
    host_update_gparams,
    moved_bytes,
    read_bytes,
    streamed_rates,
    written_bytes,
)
from protrain.planning.timeline import GPU, HOST, STREAM
from tests.planning.machines import H100
from tests.planning.test_search import make_profile

GIB = 1024**3
# Copies take no time, so nothing runs beside an update that could slow it down.
_COPIES: dict[str, Any] = dict.fromkeys(("h2d_gbps", "d2h_gbps", "bidirectional_gbps", "host_dram_gbps"), 1e9)
# With moments in bf16 too memory is the limit.
_UPDATES: dict[str, Any] = {"host_adam_gparams": 5.0, "host_adam_narrow_gparams": 5.0 * 26 / 18}
ALONE = replace(
    H100, device_bytes=60 * GIB, host_bytes=200 * GIB, contention=(), streamed_adam_gparams=None, **_UPDATES, **_COPIES
)
HELPED = replace(ALONE, streamed_adam_gparams=3.4)
PROFILE = make_profile(16, elements=208 * 1024**2, saved=1300 * 1024**2, ms=12.0)
NARROW = replace(PROFILE, moment_dtype="bfloat16")
COUNTS: dict[str, Any] = {"n_persist": 2, "n_buffer": 4, "n_swap": 0, "n_ckpt": 16}


def test_bytes_are_those_of_the_kernels() -> None:
    """As ``protrain_kernels.adam`` and ``streamed_adam`` count them."""
    assert [moved_bytes(dtype) for dtype in ("bfloat16", "float16", "float32")] == [26, 28, 28]
    assert [moved_bytes(dtype, 2) for dtype in ("bfloat16", "float16", "float32")] == [18, 20, 20]
    assert (read_bytes("bfloat16"), written_bytes("bfloat16")) == (14, 12)
    assert (read_bytes("bfloat16", 2), written_bytes("bfloat16", 2)) == (10, 8)


def test_the_hosts_rate_is_the_calibrated_one_and_without_it_a_measured_share_of_it() -> None:
    calibrated = replace(ALONE, host_adam_gparams=5.0, host_adam_narrow_gparams=6.0, device_adam_gparams=100.0)
    counted = replace(calibrated, host_adam_narrow_gparams=None)
    for machine, bf16 in ((calibrated, 6.0), (counted, 1.2 * 5.0)):
        assert host_update_gparams(NARROW, machine) == pytest.approx(bf16)
        in_fp16 = host_update_gparams(replace(NARROW, dtype="float16"), machine)
        assert in_fp16 == pytest.approx(bf16 * 18 / 26 * 28 / 20)
        assert host_update_gparams(PROFILE, machine) == 5.0
        assert device_update_gparams(NARROW, machine) == pytest.approx(100.0 * 26 / 18)
        assert device_update_gparams(PROFILE, machine) == 100.0


def of_kind(profile: Any, kind: str, lane: int, **counts: Any) -> dict[str, float]:
    """Milliseconds of the operations of one kind, by name."""
    machine = HELPED if lane == STREAM else ALONE
    plan = evaluate(profile, machine, **{**COUNTS, **counts})
    timeline = predict(profile, machine, plan).timeline
    return {
        op.name: op.end_ms - op.start_ms
        for op in timeline.operations
        if op.lane == lane and op.name.rpartition(" ")[0] == kind
    }


@pytest.mark.parametrize(
    ("kind", "lane", "counts", "share"),
    [
        ("update", HOST, {}, 18 / 26),
        ("speculative update", HOST, {"n_speculate": 8}, 18 / 26),
        ("speculative weight", HOST, {"n_speculate": 8, "n_weight_only": 8}, 12 / 16),
        ("update", GPU, {}, 18 / 26),
        ("update", STREAM, {}, 18 / 26),
    ],
    ids=["host", "speculative", "weight_only", "device", "streamed"],
)
def test_each_kind_of_update(kind: str, lane: int, counts: dict[str, Any], share: float) -> None:
    whole, narrow = (of_kind(profile, kind, lane, **counts) for profile in (PROFILE, NARROW))
    both = whole.keys() & narrow.keys()
    assert both
    assert {name: narrow[name] / whole[name] for name in both} == pytest.approx(dict.fromkeys(both, share), rel=1e-3)


def test_rates_of_streamed_updates_fill_the_same_link() -> None:
    for dtype, there, back in (("bfloat16", 14, 12), ("float16", 16, 14), ("float32", 16, 12)):
        whole, (up, down) = streamed_rates(H100, dtype, 4)
        narrow, (narrow_up, narrow_down) = streamed_rates(H100, dtype, 2)
        assert (up / whole, down / whole) == pytest.approx((there, back))
        assert (narrow_up / narrow, narrow_down / narrow) == pytest.approx((there - 4, back - 4))
        assert up + down == pytest.approx(narrow_up + narrow_down)


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_a_report_expects_the_rate_of_fewer_bytes(device_type: str) -> None:
    machine = replace(ALONE, device_type=device_type)
    plan = evaluate(NARROW, machine, **COUNTS)
    assert host_gparams(plan, NARROW, machine) == pytest.approx(5.0 * 26 / 18)


def test_a_search_finds_a_faster_plan_where_the_host_is_the_limit() -> None:
    by_bytes = H100.host_adam_gparams * 26 / 18
    machine = replace(H100, device_bytes=24 * GIB, host_bytes=60 * GIB, host_adam_narrow_gparams=by_bytes)
    whole, narrow = (search(profile, machine) for profile in (PROFILE, NARROW))
    assert narrow.moment_dtype == "bfloat16"
    assert narrow.step_ms < 0.95 * whole.step_ms
