"""Random scripts share the profiles of their models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.profiles import share_profiles


@pytest.fixture(scope="module", autouse=True)
def shared_profiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_profiles(patch)
        yield
