"""A profile's times stand beside those of plain steps, by mode; what does not fit says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.planner import computing as command
from bench.planner.cases import Case


@pytest.mark.slow
@pytest.mark.usefixtures("imported_once")
def test_both_modes_are_measured_beside_their_profile_and_kept_when_the_rest_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = replace(command.SMOKE[0], shape="no-such-shape")
    with pytest.raises(ValueError, match="there is no model 'no-such-shape'"):
        command.main(["--repeat", "2", "--out", str(tmp_path)], (command.SMOKE[0], unknown))
    table = command.Table.load(tmp_path / command.FILE)
    kept, recomputed = table.measured
    assert (kept.blocks, recomputed.blocks) == ("kept", "recomputed")
    assert kept.case == recomputed.case == command.SMOKE[0]
    assert kept.profiled_forward_ms == recomputed.profiled_forward_ms > 0
    assert recomputed.profiled_backward_ms > kept.profiled_backward_ms > 0
    for row in (kept, recomputed):
        assert len(row.forward_ms) == len(row.backward_ms) == 2
        assert min(*row.forward_ms, *row.backward_ms) > 0
    for shown in (capsys.readouterr().err, table.table()):
        assert "tiny-2x2x64  kept" in shown
        assert "tiny-2x2x64  recomputed" in shown


def test_blocks_are_recomputed_where_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[bool]] = []
    shape = command.shape_blocks

    def counted(blocks: list[torch.nn.Module], *, compile: bool, checkpointed: list[bool]) -> None:
        calls.append(checkpointed)
        shape(blocks, compile=compile, checkpointed=checkpointed)

    monkeypatch.setattr(command, "shape_blocks", counted)
    command.measured(command.SMOKE[0], 1)
    assert calls == [[False, False], [True, True]]


def test_what_does_not_fit_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = command._plain_steps

    def only_recomputed(
        case: Case, device: torch.device, *, recomputed: bool, repeat: int
    ) -> list[tuple[float, float]]:
        if not recomputed:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return steps(case, device, recomputed=recomputed, repeat=repeat)

    monkeypatch.setattr(command, "_plain_steps", only_recomputed)
    kept, recomputed = command.measured(command.SMOKE[0], 1)
    assert kept.line == ("tiny-2x2x64", "kept", "CUDA out of memory.", "", "")
    assert len(recomputed.forward_ms) == 1
