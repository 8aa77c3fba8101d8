"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def one_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has its calibrated rate in every step, so that the mean over the scenarios is the predicted time."""
    monkeypatch.setattr("protrain.planning.rates.host_rates.host_shares", lambda hardware: ((1.0, 1.0),))
