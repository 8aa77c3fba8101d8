"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that is empty when the tests begin."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def kept_profiles(cache_of_tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands count the operations of the same model and batch once, which takes most of the time of a plan."""
    monkeypatch.setenv("PROTRAIN_CACHE", str(cache_of_tests))
