"""The printed form of a calibration: every rate, its share of the datasheet where there is one, and warnings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.kernels.roofs import pcie_gbps
from protrain.hardware.calibration import report
from protrain.hardware.profile import Contention
from protrain.hardware.shipped import load, of_card

PROFILE = replace(
    load("h100"),
    source="measured",
    driver="580.1",
    torch_version="2.13.0",
    processor="a processor",
    host_adam_threads=14,
    device_copy_gbps=3000.0,
    contention=(Contention(activities=("h2d", "host_adam"), shares=(0.625, 0.5)),),
    warnings=("something is odd",),
)


def test_each_rate_has_its_percent_where_a_datasheet_is_known() -> None:
    lines = {line.split("  ")[0]: line for line in report(PROFILE).splitlines() if line}
    assert lines["device_copy_gbps"].split() == ["device_copy_gbps", "3000", "89.6%"]
    assert lines["h2d_gbps"].split()[1:] == [dict(PROFILE.rows())["h2d_gbps"]], "no promise, no percent"
    assert lines["h2d + host_adam"].endswith("h2d 62%, host_adam 50%")
    assert report(PROFILE).splitlines()[-1] == "warning: something is odd"
    long = report(replace(PROFILE, warnings=("odd " * 40,))).splitlines()
    assert max(len(line) for line in long if "odd" in line) <= 80
    assert "AdamW on the host has 1 thread\n" in report(replace(PROFILE, host_adam_threads=1))
    assert "AdamW on the host has 14 threads" in report(PROFILE)
    assert "driver 580.1, torch 2.13.0" in report(PROFILE)
    plain = report(replace(PROFILE, contention=(), warnings=()))
    assert "together" not in plain
    assert "warning" not in plain


def test_an_unknown_card_or_link_promises_nothing() -> None:
    assert of_card("NVIDIA Future 1") is None
    assert pcie_gbps(5, 16) == pytest.approx(63.0, rel=0.01)
    assert pcie_gbps(4, 8) == pytest.approx(15.75, rel=0.01)
    assert pcie_gbps(None, 16) is pcie_gbps(4, None) is pcie_gbps(9, 16) is None
