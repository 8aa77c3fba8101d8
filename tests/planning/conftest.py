"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_caution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for the machine as it is, so that none that fits is predicted to be faster."""
    monkeypatch.setattr("protrain.planning.rates.host_rates.likely_shares", lambda hardware: ((1.0, 1.0),))
