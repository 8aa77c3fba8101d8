"""Tests of what trains with other libraries: those of a file share a process of the test run and its imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import import_in_pools

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="module", autouse=True)
def imported_libraries() -> None:
    import_in_pools("transformers.trainer", "accelerate", "datasets", "trl", "peft", "lightning")


@pytest.fixture(autouse=True)
def no_precision_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Early versions of transformers leave it in the environment."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
