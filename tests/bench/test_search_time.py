"""The search is timed with what the command says, and what it finds is what the planner finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.planner import search_time as command
from protrain.hardware.shipped import load
from protrain.planning import search

ASKED = command.Search(shape="tiny", batch=2, sequence=64, hardware="h100", host_gib=1)


@pytest.mark.slow
def test_a_search_is_timed_and_kept_with_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside = replace(ASKED, inside=True)
    assert command.main(["--repeat", "2", "--out", str(tmp_path)], (ASKED, inside)) == 0
    result = command.Table.load(tmp_path / command.FILE)
    assert [row.search for row in result.searched] == [ASKED, inside]
    for row in result.searched:
        hardware = replace(load("h100"), host_bytes=2**30)
        assert row.plan == str(search(row.search.profile(), hardware, step_during_backward=row.search.inside))
        assert len(row.process_s) == 2
        assert min(row.process_s) > 0
    assert ASKED.profile().blocks == command.profile_of("tiny", 4, batch=2, sequence=64).blocks
    printed = capsys.readouterr().out
    assert printed.count("tiny   2 x 64  h100") == 2
    assert "ten million additions" in printed


def test_it_is_searched_at_least_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--repeat", "0"])
    assert "--repeat must be 1 or more" in capsys.readouterr().err
