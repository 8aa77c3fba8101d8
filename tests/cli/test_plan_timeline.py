"""The timeline of a step, in a terminal and as a picture, shows each lane at its time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain.cli.plan_picture import draw_timeline
from protrain.cli.plan_text import busy_shares, timeline_text
from protrain.planning.timeline import GPU, HOST, LANES, UP, Operation, Timeline

COLUMNS = 80 - len("host to device") - len("    100%")  # of a step


def dark_pixels(path: Path) -> torch.Tensor:
    from matplotlib import image

    pixels = torch.tensor(image.imread(path))[..., :3]
    return pixels.amin(dim=-1) < 0.9


def make_timeline(step_ms: float = 10.0) -> Timeline:
    """The device works all the time.

    Uploads take the second quarter. The host works for a tenth that began a step before.
    """
    return Timeline(
        step_ms=step_ms,
        forward_end_ms=0.4 * step_ms,
        backward_end_ms=0.98 * step_ms,
        operations=(
            Operation(lane=HOST, name="update 1", start_ms=-0.5 * step_ms, end_ms=0.1 * step_ms),
            Operation(lane=GPU, name="forward a", start_ms=0.0, end_ms=0.4 * step_ms),
            Operation(lane=UP, name="weights 1", start_ms=0.25 * step_ms, end_ms=0.5 * step_ms),
            Operation(lane=GPU, name="backward a", start_ms=0.4 * step_ms, end_ms=1.0 * step_ms),
            Operation(lane=HOST, name="update 2", start_ms=1.2 * step_ms, end_ms=1.5 * step_ms),
        ),
    )


# -- text --------------------------------------------------------------------------------------------------------------


def test_the_text_timeline_shows_each_lane_at_its_time() -> None:
    ruler, gpu, up, down, host, phases = timeline_text(make_timeline()).replace("█", "#").splitlines()
    start = gpu.index("#")
    assert ruler.split() == ["0", "10", "ms"]
    assert gpu.split() == ["GPU", "#" * COLUMNS, "100%"]
    assert [up.index("#") - start, up.rindex("#") - start] == [math.ceil(COLUMNS / 4), COLUMNS // 2 - 1]
    assert "#" not in down
    assert [host.index("#") - start, host.rindex("#") - start] == [0, COLUMNS // 10 - 1]
    assert [line.split()[-1] for line in (up, down, host)] == ["25%", "0%", "10%"]
    assert phases.index("|forward") - start == 0
    assert phases.index("|backward") - start == round(0.4 * COLUMNS)
    assert "after" not in phases, "two columns hold no word"
    assert max(map(len, timeline_text(make_timeline()).splitlines())) == 80


@pytest.mark.parametrize(("terminal", "widest"), [(70, 70), (80, 80), (300, 80), (10, 42)])
def test_the_text_timeline_fits_the_terminal(terminal: int, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(terminal))
    lines = timeline_text(make_timeline()).replace("█", "#").splitlines()
    assert max(map(len, lines)) == widest
    gpu, up = lines[1], lines[2]
    assert up.count("#") == pytest.approx(gpu.count("#") / 4, abs=1)


def test_a_column_is_as_dark_as_its_lane_is_busy() -> None:
    half = Operation(lane=UP, name="weights 1", start_ms=0.05, end_ms=0.10)  # the first of those of 0.1 ms each
    shares = busy_shares(
        Timeline(step_ms=10.0, forward_end_ms=4.0, backward_end_ms=9.0, operations=(half,)),
        UP,
        columns=100,
    )
    assert shares[0] == pytest.approx(0.5)
    assert sum(shares) == pytest.approx(0.5)


def test_bars_lie_where_the_operations_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, timeline = tmp_path / "step.svg", make_timeline()
    draw_timeline(timeline, "title", path)
    text = path.read_text()
    assert [name for name in LANES if f"<!-- {name} -->" in text] == [*LANES[: HOST + 1]]
    idle = replace(timeline, operations=tuple(each for each in timeline.operations if each.lane != HOST))
    draw_timeline(idle, "title", tmp_path / "idle.svg")
    assert f"<!-- {LANES[HOST]} -->" not in (tmp_path / "idle.svg").read_text(), "the host has nothing to do"
    # There is one bar for each operation inside the step, and none for the update after it.
    bars = text.count('id="PolyCollection_') + text.count('id="FillBetweenPolyCollection_')
    assert bars == 4
    for color in ("#1f77b4", "#9467bd", "#2ca02c", "#d62728"):  # forward, backward, weights, update
        assert color in text


def test_speculative_updates_have_a_colour_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.svg"
    early = Operation(lane=HOST, name="speculative update 3", start_ms=6.0, end_ms=8.0)
    timeline = make_timeline()
    draw_timeline(replace(timeline, operations=(*timeline.operations, early)), "title", path)
    assert "#e377c2" in path.read_text()
    draw_timeline(timeline, "title", path)
    assert "#e377c2" not in path.read_text()


def test_eighty_blocks_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kinds = [("forward", GPU, 0.0), ("weights", UP, 0.2), ("backward", GPU, 80.0), ("update", HOST, 80.1)]
    operations = tuple(
        Operation(lane=lane, name=f"{kind} {index}", start_ms=begin + index, end_ms=begin + index + 0.7)
        for kind, lane, begin in kinds
        for index in range(80)
    )
    path = tmp_path / "step.png"
    draw_timeline(
        Timeline(step_ms=161.0, forward_end_ms=80.0, backward_end_ms=160.0, operations=operations), "title", path
    )
    assert dark_pixels(path).float().mean() > 0.1
