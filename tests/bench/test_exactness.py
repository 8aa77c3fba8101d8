"""The comparison of bits: it runs on one process and on two, and it sees a bit that differs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.exactness.__main__ import Exactness, main
from bench.exactness.worker import hash_sum


@pytest.mark.slow
def test_one_process_and_two_have_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "exactness.json"
    size = ["--layers", "2", "--batch", "1", "--sequence", "16", "--steps", "3", "--warm-up", "1"]

    assert main(["--gpus", "2", "--device-memory", "14MiB", *size, "--out", str(out)]) == 0

    record = Exactness.load(out)
    one, small, two, both = record.trainings
    assert [(each.gpus, each.device_memory) for each in record.trainings] == [
        (1, None),
        (1, "14MiB"),
        (2, None),
        (2, "14MiB"),
    ]
    assert len(one.losses) == 4 * 2
    assert len(one.norms) == 4
    assert "n_persist=2/2" in one.plan
    assert "n_persist=2/2" not in small.plan + both.plan
    assert record.same
    assert "every bit agrees" in capsys.readouterr().out
    for other in (
        replace(two, losses=(*two.losses[:-1], 0.0)),
        replace(two, norms=(*two.norms[:-1], 0.0)),
        replace(two, checksum="0" * 16),
    ):
        differs = replace(record, trainings=(one, small, other, both))
        assert not differs.same
        assert "NOT THE SAME BITS" in differs.table()


def test_a_number_of_gpus_whose_mean_is_not_exact_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--gpus", "3"])
    assert "--gpus must be a power of two" in capsys.readouterr().err


def test_the_checksum_knows_bits_and_places_and_adds_over_shards() -> None:
    torch.manual_seed(0)
    values = torch.randn(1000)

    def checksum(values: torch.Tensor, first: int = 0, seed: int = 1) -> int:
        return hash_sum(values, first=first, seed=seed)

    whole = checksum(values)
    assert whole == checksum(values[:300]) + checksum(values[300:], first=300)
    flipped = values.view(torch.int32).clone()
    flipped[7] ^= 1
    swapped = values.clone()
    swapped[[3, 4]] = values[[4, 3]]
    others = [checksum(flipped.view(torch.float32)), checksum(swapped), checksum(-values), checksum(values, seed=2)]
    assert len({whole, *others}) == 5
