"""Ranks calibrate together: the slowest decides, what they found is theirs alone, and one that fails ends all."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from protrain.cli.main import main
from protrain.consensus import _with_collectives, of_all
from protrain.distributed.joining import join
from protrain.hardware.cache import Machine, cached, store
from protrain.hardware.calibration import calibrate
from protrain.hardware.calibration.activities import Activity, Collectives, Run, product
from protrain.hardware.calibration.contention import rates_on_ranks
from protrain.hardware.calibration.report import report
from protrain.hardware.detection import assume, detect
from protrain.hardware.profile import Contention, HardwareProfile
from tests.distributed.pool import on_ranks

pytestmark = pytest.mark.xdist_group("ranks")  # which shares the processes of the other tests of several ranks
CPU = torch.device("cpu")
SLEEP_S = 0.005
MIB, GIB = 1024**2, 1024**3


def calibrate_with_a_slow_rank(rank: int, cache: str) -> tuple[str, str, HardwareProfile | None]:
    """What the command prints on ``rank``, and the profile that is found then. Rank 1 sleeps before its products."""

    def slow_product(device: torch.device, width: int) -> Run:
        run = product(device, width)

        def sleep_and_run() -> None:
            time.sleep(SLEEP_S)
            run()

        return sleep_and_run

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("PROTRAIN_CACHE", cache)
        if rank == 1:
            patch.setattr("protrain.hardware.calibration.activities.product", slow_product)
        assert main(["calibrate", "--device", "cpu", "--seconds", "0.1", "--json"]) == 0, err.getvalue()
        return out.getvalue(), err.getvalue(), cached(CPU)


@pytest.mark.slow
def test_the_slowest_rank_decides_and_as_many_ranks_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out, err, found), (nothing, quiet, also) = on_ranks(2, calibrate_with_a_slow_rank, str(tmp_path))
    assert (nothing, "protrain: " in quiet) == ("", False), "one process speaks for all"
    profile = HardwareProfile.from_json(out)
    assert found == also == profile, "what rank 0 has kept"
    [kept] = (tmp_path / "hardware").iterdir()
    assert f"kept in {kept}" in err
    assert "-x2-" in kept.name
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path))
    assert cached(CPU) is None, "one process finds nothing"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cached(CPU) == profile
    assert profile.world_size == 2

    assert profile.matmul_tflops < 2 * 512**3 / SLEEP_S / 1e12
    for rate in (profile.all_gather_gbps, profile.all_to_all_gbps):
        assert rate is not None
        assert 0 < rate < 100, "two processes of one host move less than its memory does"
    assert profile.contention[-1].activities == ("collective", "matmul")
    assert ", 2 processes" in report(profile)


def the_profile_of_two(rank: int, cache: str) -> tuple[HardwareProfile, HardwareProfile]:
    """What a wrap goes by where two ranks have calibrated, and where one process has, with 8 GB of host memory."""
    ranks = join(None)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTRAIN_CACHE", f"{cache}/{rank}")
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        here = Machine.of(CPU)
        one = replace(here, world_size=1)
        base = replace(assume(CPU), source="measured", host_adam_gparams=0.5, host_dram_gbps=20.0)
        store(replace(base, **vars(one)), one)
        found.append(of_all(ranks, detect(CPU, host_memory=8 * 10**9), CPU))
        kept = Contention(activities=("matmul", "collective"), shares=(0.75, 0.5))
        rates: dict[str, Any] = {"all_gather_gbps": 7.0 - rank, "all_to_all_gbps": 3.0 + rank, "contention": (kept,)}
        store(replace(base, **vars(here) | rates), here)
        # There is no GPU here that could be measured. With one its rates would be others.
        found.append(of_all(ranks, detect(CPU, host_memory=8 * 10**9), torch.device("cuda")))
    return found[0], found[1]


@pytest.mark.slow
def test_a_wrap_takes_what_as_many_ranks_have_measured_and_halves_what_one_has(tmp_path: Path) -> None:
    for one, two in on_ranks(2, the_profile_of_two, str(tmp_path)):
        assert (one.host_adam_gparams, one.host_dram_gbps, one.all_gather_gbps) == (0.25, 10.0, None)
        assert one.share("matmul", "collective") == 1.0
        assert (two.host_adam_gparams, two.host_dram_gbps) == (0.5, 20.0)
        assert (two.all_gather_gbps, two.all_to_all_gbps) == (6.0, 3.0), "the least of both ranks"
        assert two.share("matmul", "collective") == 0.75
        assert one.host_bytes == two.host_bytes == 4 * 10**9
        assert (one.world_size, two.world_size) == (2, 2)


def collectives_of(rank: int) -> tuple[list[list[int]], list[list[int]], dict[str, float], dict[str, float], int]:
    """The bytes in both halves of an exchanged and of a gathered tensor; rates of collectives beside naps on rank 0."""
    ranks = join(None)
    ranks.use(CPU)
    collectives = Collectives(ranks, CPU, 3 * MIB + 1)
    collectives._whole.fill_(rank + 1)
    collectives.exchange()
    exchanged = [half.unique().tolist() for half in collectives._received.view(2, -1)]
    collectives.gather()
    gathered = [half.unique().tolist() for half in collectives._whole.view(2, -1)]
    amounts = {name: activity.amount for name, activity in collectives.activities().items()}
    ended = 0

    def both() -> None:
        nonlocal ended
        collectives.both()
        ended += 1

    naps = {"naps": Activity(lambda: time.sleep(0.01), 1.0)} if rank == 0 else {}
    together = {"collective": Activity(both, 1.0), **naps}
    found = rates_on_ranks(ranks, together, "a test", duration_s=0.2)
    rates = {name: median(of_slices) for name, of_slices in found.items()}
    return exchanged, gathered, amounts, rates, ended


def measured_for_a_wrap(rank: int) -> tuple[HardwareProfile, HardwareProfile]:
    """A profile that knows nothing of collectives, and what ranks make of it that measure them before they plan."""
    ranks = join(None)
    ranks.use(CPU)
    pair = Contention(activities=("h2d", "d2h"), shares=(0.9, 0.8))
    own = replace(assume(CPU), world_size=2, contention=(pair,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr("protrain.consensus._WIDTH", 256)
        return own, _with_collectives(ranks, own, CPU)


def test_a_wrap_measures_collectives_as_calibration_does() -> None:
    (own, found), (_, also) = on_ranks(2, measured_for_a_wrap)
    rates = [(each.all_gather_gbps, each.all_to_all_gbps, each.contention) for each in (found, also)]
    assert rates[0] == rates[1], "the least of both ranks"
    assert found.all_gather_gbps is not None
    assert found.all_to_all_gbps is not None
    assert min(found.all_gather_gbps, found.all_to_all_gbps) > 0
    *kept, measured = found.contention
    assert (tuple(kept), measured.activities) == (own.contention, ("collective", "matmul"))


def calibrate_unlike_gpus(rank: int, cache: str) -> tuple[HardwareProfile, HardwareProfile | None]:
    """Calibrate ranks whose GPUs, played by CPUs, have unlike names and memory.

    Returns:
        The profile that ``rank`` has measured, and the one that it finds afterwards.
    """
    name, memory_bytes = ("Large 1", 16 * GIB) if rank == 0 else ("Small 1", GIB // 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTRAIN_CACHE", cache)
        patch.setattr("protrain.hardware.cache.device_name", lambda device: name)
        sized = replace(assume(CPU), device_bytes=memory_bytes)
        patch.setattr("protrain.hardware.calibration.run.assume", lambda device: sized)
        return calibrate(CPU, seconds=1.0), cached(CPU)


@pytest.mark.slow
def test_unlike_gpus_are_measured_in_sizes_for_the_least_and_all_find_the_profile(tmp_path: Path) -> None:
    both = on_ranks(2, calibrate_unlike_gpus, str(tmp_path))
    assert [profile.name for profile, _ in both] == ["Large 1", "Small 1"]
    for profile, found in both:
        assert profile.device_bytes == GIB // 10, "a plan for all of them has to fit the least"
        assert found == profile
        assert any("unlike GPUs: Large 1 and Small 1" in warning for warning in profile.warnings)
    assert both[0][0].matmul_tflops == both[1][0].matmul_tflops


def test_ranks_exchange_and_gather_as_in_training_and_end_together() -> None:
    (exchanged, gathered, amounts, rates, count), (also, same, _, others, agreed) = on_ranks(2, collectives_of)
    assert exchanged == also == gathered == same == [[1], [2]]
    half_gb = 3 * MIB / 2 / 1e9  # of which a rank has the other half
    assert amounts == {"gather": half_gb, "exchange": half_gb, "collective": 2 * half_gb}
    assert count == agreed > 10, "all ranks do equally many"
    assert 20 < rates["naps"] < 100
    assert 0.4 < rates["collective"] / others["collective"] < 2.5, "each waits for the other"
