"""Rates and gains follow from bytes, medians and roofs; files and pictures hold them."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.kernels import report
from bench.kernels.roofs import NO_ROOF
from bench.kernels.rows import COMPILED, EAGER, OURS, Row, with_speedups

MakeRow = Callable[..., Row]


def test_a_rate_is_bytes_by_median_in_percent_of_both_ceilings(make_row: MakeRow) -> None:
    row = make_row()
    assert (row.gbps, row.percent_of_roof, row.percent_of_datasheet) == (1500.0, 75.0, 50.0)


def test_without_bytes_there_is_no_rate(make_row: MakeRow) -> None:
    row = make_row(bytes=0, roof=NO_ROOF, roof_gbps=None, datasheet_gbps=None)
    assert (row.gbps, row.percent_of_roof) == (None, None)
    assert NO_ROOF in report.table([row])


def test_a_table_has_the_columns_that_have_a_value(make_row: MakeRow) -> None:
    head = report.table(with_speedups([make_row(), make_row(implementation=EAGER, median_ms=9.0)])).splitlines()[1]
    assert "of roof  of datasheet  over eager  over best peer" in head
    assert "over compile" not in head
    untimed = report.table([make_row(median_ms=None, p20_ms=None, p80_ms=None, host_us=None, extra_memory_bytes=None)])
    assert untimed.splitlines()[1].split() == ["implementation", "verdict"]
    assert untimed.splitlines()[2].split() == [OURS, "bits", "equal"]


def test_gains_are_over_peers_of_the_same_operator_shape_and_type(make_row: MakeRow) -> None:
    ours, *others = with_speedups(
        [
            make_row(),
            make_row(implementation=EAGER, version="2.11", median_ms=9.0),
            make_row(implementation=COMPILED, version="2.11", median_ms=5.0),
            make_row(implementation="a peer", version="0.7", median_ms=3.0),
            make_row(implementation="wrong and fast", verdict="RED: off", median_ms=None),
            make_row(implementation="elsewhere", shape="another block", median_ms=0.1),
        ]
    )
    assert (ours.speedup_over_eager, ours.speedup_over_compile, ours.speedup_over_best_peer) == (4.5, 2.5, 1.5)
    assert ours.best_peer == "a peer 0.7"
    assert all(row.speedup_over_best_peer is None for row in others)


def test_a_second_way_of_ours_is_no_peer(make_row: MakeRow) -> None:
    rows = [make_row(), make_row(implementation=f"{OURS}, zero copy", median_ms=1.0), make_row(implementation=EAGER)]
    assert with_speedups(rows)[0].best_peer == EAGER


def test_json_and_csv_hold_every_figure_and_the_machine(make_row: MakeRow, tmp_path: Path) -> None:
    report.write_results([make_row(), make_row(implementation=EAGER, median_ms=None)], tmp_path)
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert found[0]["gbps"] == 1500.0
    assert found[1]["median_ms"] is None
    assert {"gpu", "driver", "torch", "triton", "commit"} <= set(found[0])
    with open(tmp_path / "kernels.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["gbps"] for line in lines] == ["1500.0", ""]
    assert set(lines[0]) == set(found[0])


def test_a_picture_is_drawn_of_what_was_timed_alone(make_row: MakeRow, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    unnamed = make_row(operator="checked alone", median_ms=None)
    moved = make_row(operator="moved", flops=0)
    written = report.write_results([make_row(), make_row(bytes=10**9), unnamed, moved], tmp_path)
    pictures = {path.name: path for path in written if path.suffix == ".png"}
    assert set(pictures) == {"roofline-mix-twice.png", "roofline-moved.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.values())


def test_without_matplotlib_the_rest_is_written(
    make_row: MakeRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "can_draw", lambda: False)
    written = report.write_results([make_row()], tmp_path)
    assert [path.name for path in written] == ["kernels.json", "kernels.csv"]


def test_the_table_says_what_moves_and_what_limits_it(make_row: MakeRow) -> None:
    text = report.table([make_row(), make_row(implementation=EAGER, verdict="RED: off by one", median_ms=None)])
    lines = text.splitlines()
    assert lines[0] == "mix, twice: gpt2-10b block, bfloat16; 2.79 GiB to move, limited by device copy"
    assert "1,500" in lines[2]
    assert "75.0%" in lines[2]
    assert "RED: off by one" in lines[3]
    assert "%" not in lines[3]
