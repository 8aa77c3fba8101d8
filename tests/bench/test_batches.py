"""The table of batches: what is predicted is what `protrain plan --compare` says, and only like is set beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.planner.batches import Table, main, measured
from protrain.cli.main import main as protrain_command

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "h200"
FOUND = "compare-llama-7b-8x2048-2gpus.json"


def test_records_of_the_same_model_and_sequence_are_set_beside_predictions(tmp_path: Path) -> None:
    for name in (FOUND, "compare-llama-7b-8x2048-within-77GiB-2gpus.json", "compare-llama-7b-1x32768.json"):
        shutil.copy(RESULTS / name, tmp_path)
    rates = measured(tmp_path, "llama-7b", 2048)
    assert list(rates) == [(2, 8)]
    assert [round(rate, -1) for rate in rates[2, 8]] == [13140], (
        "half of what docs/results/several-gpus.md says of two GPUs"
    )
    assert measured(tmp_path, "opt-13b", 2048) == {}


@pytest.mark.slow
def test_the_table_says_what_the_command_line_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "tiny", "--sequence", "64", "--batches", "2", "--gpus", "1", "2"]
    assert main([*options, "--machine", "a100", "--out", str(tmp_path)]) == 0
    table = Table.load(tmp_path / "batches-tiny-a100.json")
    assert (tmp_path / "batches-tiny-a100.png").stat().st_size > 10_000
    assert [(row.gpus, row.batch) for row in table.found] == [(1, 2), (2, 2)]
    capsys.readouterr()
    plan = [
        "plan",
        "tiny",
        "--batch",
        "2",
        "--sequence",
        "64",
        "--chunked-loss",
        "--compare",
        "a100x1,a100x2",
        "--json",
    ]
    assert protrain_command(plan) == 0
    said = json.loads(capsys.readouterr().out)["machines"].values()
    for row, one, gpus in zip(table.found, said, (1, 2), strict=True):
        assert row.predicted_tokens_per_s == one["tokens_per_s"] / gpus > 0
