"""Callbacks of Trainers that read the whole model get the same weights on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.pool import on_ranks
from tests.integrations.callback_runs import averages, averages_on_rank, error_of_first_alone


def close(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("kind", ["BEMA", "Average"])
def test_averages_of_one_process(kind: str, tmp_path: Path) -> None:
    if kind == "BEMA":
        pytest.importorskip("trl")
    close(averages(kind, tmp_path, on_protrain=True), averages(kind, tmp_path, on_protrain=False))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BEMA", "Average"])
def test_averages_of_two_processes(kind: str, tmp_path: Path) -> None:
    if kind == "BEMA":
        pytest.importorskip("trl")
    ours, other = on_ranks(2, averages_on_rank, kind, tmp_path / "ours", True)
    assert all(torch.equal(other[name], value) for name, value in ours.items())
    close(ours, on_ranks(2, averages_on_rank, kind, tmp_path / "plain", False)[0])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a read of model.embed_tokens.weight", "save_model()"])
def test_what_one_rank_does_alone_is_refused_on_all(what: str, tmp_path: Path) -> None:
    for error in on_ranks(2, error_of_first_alone, what, tmp_path):
        assert f"rank 0 came to {what}" in error
