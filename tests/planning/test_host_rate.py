"""The host's rate in a step, which a report holds what it measured against, is that of the timeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan, evaluate
from protrain.planning.answer import host_gparams
from tests.planning.machines import H100
from tests.planning.test_search import make_profile

GIB = 1024**3
MACHINE = replace(H100, device_bytes=60 * GIB, host_bytes=200 * GIB, host_adam_gparams=5.0, streamed_adam_gparams=None)
ALONE = replace(MACHINE, h2d_gbps=1e9, d2h_gbps=1e9, bidirectional_gbps=1e9)  # copies take no time
PROFILE = make_profile(16, elements=208 * 1024**2, saved=1300 * 1024**2, ms=12.0)
COUNTS: dict[str, Any] = {"n_persist": 2, "n_buffer": 4, "n_swap": 0, "n_ckpt": 16}


def rate(hardware: HardwareProfile, *, inside: bool = False, **counts: Any) -> float:
    plan: Plan = evaluate(PROFILE, hardware, step_during_backward=inside, **{**COUNTS, **counts})
    return host_gparams(plan, PROFILE, hardware, step_during_backward=inside)


@pytest.mark.parametrize(
    "counts",
    [{}, {"n_speculate": 8}, {"n_speculate": 8, "n_weight_only": 8}],
    ids=["after_the_norm", "speculative", "weight_only"],
)
def test_alone_it_is_the_calibrated_one_and_beside_copies_less(counts: dict[str, Any]) -> None:
    assert rate(ALONE, **counts) == pytest.approx(5.0)
    assert 2.0 < rate(MACHINE, **counts) < 4.99


def test_beside_updates_by_the_gpu_it_is_less() -> None:
    assert rate(replace(ALONE, streamed_adam_gparams=3.4)) < 4.9


def test_inside_backward_too() -> None:
    assert rate(ALONE, inside=True) == pytest.approx(5.0)


def test_where_the_host_updates_nothing_there_is_none() -> None:
    roomy = replace(MACHINE, device_bytes=200 * GIB)
    n_chunks = evaluate(PROFILE, roomy, **COUNTS).n_chunks
    assert rate(roomy, n_persist=n_chunks, n_buffer=0) == 0.0


def test_on_a_cpu_nothing_runs_beside_it() -> None:
    cpu = replace(MACHINE, device_type="cpu")
    assert rate(cpu) == 5.0
    n_chunks = evaluate(PROFILE, cpu, **COUNTS).n_chunks
    assert rate(replace(cpu, device_bytes=200 * GIB), n_persist=n_chunks, n_buffer=0) == 0.0
