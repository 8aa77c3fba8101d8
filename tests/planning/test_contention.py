"""What lanes leave each other: measured groups where there are any, shared ceilings otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protrain.hardware.profile import Contention, HardwareProfile
from protrain.planning.contention import OTHERS, rates
from protrain.planning.timeline import DOWN, GPU, HOST, UP
from tests.planning.machines import H100

MACHINE = replace(
    H100,
    h2d_gbps=50.0,
    d2h_gbps=50.0,
    bidirectional_gbps=80.0,
    host_dram_gbps=160.0,
    host_adam_gparams=5.0,
    contention=(),
)


def left(hardware: HardwareProfile, lane: int, *beside: int, adam_gbps: float = 130.0) -> float:
    return float(rates(hardware, adam_gbps)[*(int(other in beside) for other in OTHERS[lane]), lane])


def test_shared_ceilings() -> None:
    assert left(MACHINE, UP) == left(MACHINE, HOST) == left(MACHINE, GPU, UP, DOWN, HOST) == 1.0
    assert left(MACHINE, UP, DOWN) == left(MACHINE, DOWN, UP, GPU) == pytest.approx(0.8)
    assert left(MACHINE, HOST, UP) == pytest.approx(110 / 130)
    assert left(MACHINE, HOST, UP, DOWN) == pytest.approx(60 / 130)
    assert left(MACHINE, DOWN, HOST) == pytest.approx(160 / 180)
    assert left(replace(MACHINE, host_dram_gbps=90.0), HOST, UP, DOWN) == 0.25, "something is always left"


def test_what_is_known_of_collectives_alone_says_nothing_of_others() -> None:
    """As when ranks have measured only them, on a card of which nothing else is known."""
    known = replace(MACHINE, contention=(Contention(activities=("matmul", "collective"), shares=(0.7, 0.9)),))
    assert rates(known, 130.0).tolist() == rates(MACHINE, 130.0).tolist()
    assert left(known, UP, DOWN) == pytest.approx(0.8)


def test_measured_groups_take_their_place() -> None:
    measured = replace(
        MACHINE,
        contention=(
            Contention(activities=("h2d", "d2h"), shares=(0.9, 0.95)),
            Contention(activities=("h2d", "host_adam", "matmul"), shares=(0.6, 0.7, 1.02)),
        ),
    )
    assert left(measured, UP, DOWN) == 0.9
    assert left(measured, UP, DOWN, HOST, GPU) == 0.6, "of measured groups the one that leaves least"
    assert left(measured, UP, HOST) == 1.0, "nothing was measured for these two alone"
    assert left(measured, HOST, UP, GPU) == 0.7
    assert left(measured, GPU, UP, HOST) == 1.0, "never more than the rate alone"
