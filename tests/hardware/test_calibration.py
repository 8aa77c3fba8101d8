"""Calibration for real, in small: what is measured, how it is timed, and what running together costs."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protrain.distributed.ranks import Ranks
from protrain.hardware.calibration import calibrate
from protrain.hardware.calibration.activities import CPU, Activity, AdamChunk, host_updates, largest_product
from protrain.hardware.calibration.contention import groups_of, rates_of, rates_together, shares_of
from protrain.hardware.calibration.run import Calibration
from protrain.hardware.calibration.timing import Effort
from protrain.hardware.detection import assume
from protrain.hardware.memory import update_threads, usable_cores
from protrain.hardware.nvml import GpuFacts
from protrain.hardware.profile import RATE_UNITS, Contention, HardwareProfile
from protrain_kernels import padded

GIB = 1024**3


def _effort(seconds: float = 30.0, host_gib: float = 64.0, device_gib: float = 64.0) -> Effort:
    return Effort(seconds=seconds, host_room_bytes=int(host_gib * GIB), device_room_bytes=int(device_gib * GIB))


def test_everything_that_a_cpu_has_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[str, float]] = []
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path))
    before = torch.get_num_threads()
    profile = calibrate("cpu", seconds=0.25, save=False, progress=lambda part, done: parts.append((part, done)))
    assert torch.get_num_threads() == before
    assert not (tmp_path / "hardware").exists(), "save=False"
    assert (profile.source, profile.device_type, profile.driver) == ("measured", "cpu", "none")
    assert profile.torch_version == torch.__version__
    rates = {name for name, _ in profile.rows() if name.endswith(RATE_UNITS)}
    assert rates > {name for name, _ in assume(CPU).rows() if name.endswith(RATE_UNITS)}
    assert {"host_adam_weight_gparams", "host_adam_narrow_gparams"} < rates
    assert profile.host_adam_threads == update_threads(usable_cores(), beside_gpu=False)
    assert profile.streamed_adam_gparams is profile.all_gather_gbps is None
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert any("so little time that tensors of" in line for line in profile.warnings)
    together = {group.activities: group.shares for group in profile.contention}
    assert {len(group) for group in together} == {2}, "pairs are all that the planner reads"
    # Two activities that each keep a core or more busy can't both go on as if they were alone in every pair.
    assert 0 < min(map(min, together.values())) < 0.95
    done = [share for _, share in parts]
    assert done == sorted(done)
    assert (done[0], parts[-1]) == (0.0, ("done", 1.0))


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_duration_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be more than 0, not"):
        calibrate("cpu", seconds=seconds)


def test_each_way_of_the_hosts_adamw_takes_parts_of_all_chunks_in_turn() -> None:
    """The rate differs between chunks. To make the weight alone changes nothing, and moments in bf16 are others."""
    chunks = [AdamChunk.on(CPU, 4096) for _ in range(3)]
    ways = host_updates(chunks, 1)
    assert {way.amount for way in ways.values()} == {3 * 1280 / 1e9}

    def changed(way: str) -> list[tuple[bool, ...]]:
        before = [[tensor.clone() for tensor in chunk] for chunk in chunks]
        ways[way].unit()
        return [
            tuple(not torch.equal(now, was) for now, was in zip(chunk, was_chunk, strict=True))
            for chunk, was_chunk in zip(chunks, before, strict=True)
        ]

    assert changed("host_adam_weight") == [(False,) * 5] * 3
    assert changed("host_adam_narrow") == [(True, True, False, False, False)] * 3
    assert changed("host_adam") == [(True, True, True, True, False)] * 3
    untouched = chunks[0].exp_avg[1280:].clone()
    fresh = host_updates(chunks, 1)["host_adam"]
    fresh.unit()
    assert torch.equal(chunks[0].exp_avg[1280:], untouched)
    fresh.unit()
    assert not torch.equal(chunks[0].exp_avg[1280:], untouched)


@pytest.mark.parametrize(("rates", "threads"), [((4.0, 4.1), 14), ((4.0, 4.2), 15)])
def test_beside_a_gpu_one_core_more_is_taken_where_that_gains(
    rates: tuple[float, float], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = Calibration(torch.device("cuda"), _effort(), Ranks(None), cores=16, progress=None)
    found = iter(rates)
    monkeypatch.setattr(calibration, "_rates", lambda *_: {"host_adam": [next(found)]})
    assert calibration._threads(AdamChunk.on(CPU, 128)) == threads


def test_beside_a_gpu_a_core_launches_and_the_card_is_asked_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = Calibration(torch.device("cuda"), _effort(), Ranks(None), cores=4, progress=None)
    monkeypatch.setattr("protrain.hardware.calibration.run.LAUNCHING", _failing(1, partial("".index, "launched")))
    assert calibration._rates("memory", {"dram": _naps()}, 0.1).keys() == {"dram"}, "with all cores"
    with pytest.raises(ValueError, match="substring not found"):
        calibration._rates("naps", {"naps": _naps()}, 0.1)
    card = GpuFacts(
        driver="580.1", pcie_generation=5, pcie_width=8, pcie_generation_max=5, pcie_width_max=16, throttled=True
    )
    monkeypatch.setattr("protrain.hardware.calibration.run.gpu_facts", lambda device: card)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    hot, narrow = calibration._card_warnings({"matmul": _naps(), "h2d": _naps()})
    assert "slows itself down" in hot
    assert "width x8" in narrow


def test_sizes_go_with_time_and_room() -> None:
    full = _effort()
    assert full.tensor_bytes == GIB
    for effort in (_effort(seconds=3.0), _effort(host_gib=1.2), _effort(device_gib=1.2)):
        assert effort.size == pytest.approx(0.1)
        assert effort.tensor_bytes == 102 * 1024**2
    assert _effort(seconds=90.0).size == 1.0
    tiny = _effort(seconds=0.001)
    assert tiny.tensor_bytes == 1024**2
    assert padded(tiny.adam_elements) == tiny.adam_elements
    rooms = ((30.0, 120), (30.0, 30), (30.0, 2), (1.0, 120))
    assert [_effort(seconds, host_gib=room).host_chunks for seconds, room in rooms] == [12, 3, 1, 1]


@pytest.mark.parametrize(("seconds_of_1024", "width"), [(0.07, 1024), (0.7, 512), (1e9, 256)])
def test_products_are_smaller_on_a_slow_device(
    monkeypatch: pytest.MonkeyPatch, seconds_of_1024: float, width: int
) -> None:
    def timer(_: str, globals: Any, **options: Any) -> Any:
        seconds = seconds_of_1024 * (len(globals["run"].args[0]) / 1024) ** 3
        return SimpleNamespace(timeit=lambda number: SimpleNamespace(mean=seconds))

    monkeypatch.setattr("protrain.hardware.calibration.activities.Timer", timer)
    assert largest_product(CPU, _effort())[1] == width


def _naps(lock: threading.Lock | None = None) -> Activity:
    """Units of 10 ms that cost no core, so that a busy machine disturbs them little."""

    def run() -> None:
        with lock if lock is not None else contextlib.nullcontext():
            time.sleep(0.01)
        time.sleep(0.001)  # lets the other have the lock

    return Activity(run, 1.0)


def test_what_shares_nothing_keeps_its_rate_and_what_shares_all_has_half() -> None:
    found = []
    for _ in range(10):  # a busy machine may end naps late in one of the three, hardly in all of ten
        lock = threading.Lock()
        runs = {
            ("a",): [rates_together({"a": _naps()}, duration_s=0.3)],
            ("a", "b"): [rates_together({"a": _naps(), "b": _naps()}, duration_s=0.3)],
            ("a", "c"): [rates_together({"a": _naps(lock), "c": _naps(lock)}, duration_s=0.3)],
        }
        (alone,), (apart, _), (shared, _) = (sorted(map(max, run[0].values())) for run in runs.values())
        found.append((alone, apart, shared))
        if 30 < alone < 92 and apart > 0.75 * alone and 0.3 * alone < shared < 0.75 * alone:
            return
    pytest.fail(f"never a half of what is shared, and all of what is not: {found}")


def test_the_best_round_counts_and_all_work_of_the_hosts_adamw() -> None:
    adam: dict[tuple[str, ...], Any] = {
        (name,): [{name: [4.0, 4.0]}, {name: [1.0, 4.0]}]
        for name in ("host_adam", "host_adam_weight", "host_adam_narrow")
    }
    runs = {
        ("h2d",): [{"h2d": [10.0, 10.0, 2.0]}, {"h2d": [8.0]}],  # something else slowed the machine down later
        ("d2h",): [{"d2h": [2.0]}, {"d2h": [4.0]}],
        ("h2d", "d2h"): [{"h2d": [5.0], "d2h": [2.0]}, {"h2d": [7.0], "d2h": [1.6]}],
        **adam,
    }
    assert shares_of(runs) == [Contention(activities=("h2d", "d2h"), shares=(0.7, 0.4))]
    rates = rates_of(runs)
    assert (rates["h2d_gbps"], rates["d2h_gbps"], rates["bidirectional_gbps"]) == (10.0, 4.0, 8.6)
    assert rates["host_adam_gparams"] == pytest.approx(4 / 1.75)
    assert groups_of(["h2d", "d2h"]) == [("h2d",), ("d2h",), ("h2d", "d2h")]


def _failing(after: int, fail: Callable[[], object]) -> Activity:
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        time.sleep(0.001)
        if len(runs) == after:
            fail()

    return Activity(run, 1.0)


@pytest.mark.parametrize("after", [1, 6])
def test_an_activity_that_fails_ends_all(after: int) -> None:
    failing = _failing(after, partial("".index, "no such kernel"))
    with pytest.raises(ValueError, match="substring not found"):
        rates_together({"a": _naps(), "b": failing}, duration_s=60.0)


def test_an_interruption_ends_all() -> None:
    """Nothing may still copy what is unpinned next."""
    before = threading.enumerate()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            rates_together({"a": _naps(), "b": _failing(5, _thread.interrupt_main)}, duration_s=60.0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    begin = time.perf_counter()
    measured = calibrate("cuda", save=False)
    assert measured.device_type == "cuda"
    assert measured.streamed_adam_gparams is not None
    assert ("streamed_adam", "matmul") in {group.activities for group in measured.contention}
    if "PYTEST_XDIST_WORKER" in os.environ:  # other tests work on the GPU and the host, and change the rates
        return
    assert time.perf_counter() - begin < 60
    assert measured.matmul_tflops > 10
    assert measured.h2d_gbps < measured.device_copy_gbps
    assert measured.bidirectional_gbps < 1.1 * (measured.h2d_gbps + measured.d2h_gbps)
    assert 0.4 < measured.device_adam_gparams * 26 / measured.device_copy_gbps < 2.5
    assert 0 < measured.streamed_adam_gparams < measured.device_adam_gparams
    assert 0.2 < measured.share("host_adam", "h2d") < 1.05
    assert measured.share("matmul", "h2d") > 0.7
