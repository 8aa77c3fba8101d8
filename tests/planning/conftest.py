"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest

from tests.planning.machines import judge_as_calibrated


@pytest.fixture
def judged_as_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made for the host as it was calibrated, so that the search judges them by the predicted time."""
    judge_as_calibrated(monkeypatch)
