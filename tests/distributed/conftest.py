"""All tests of several ranks run in one process of the test run, so that they share the processes that they start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.profiles import share_profiles

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks, also where this folder was asked for by name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="module", autouse=True)
def shared_profiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_profiles(patch)
        yield
