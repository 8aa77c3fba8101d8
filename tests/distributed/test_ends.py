"""A process group is ended by whoever has started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.apart import Group
from tests.distributed.out_of_step import end


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_wrap_ends_a_group_that_it_has_started(tmp_path: Path, own: bool) -> None:
    with Group(2, end, own, folder=tmp_path, frees_modules=True) as group:
        for ending in group.endings(range(2), timeout_s=120).values():
            assert ending.status == 0, ending.text
            assert f"trained\nthere is a group: {own}\n" in ending.text, ending.text
