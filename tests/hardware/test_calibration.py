"""Calibration for real, in small: what is measured, how it is timed, and what running together costs."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MethodType
from typing import cast

import pytest
import torch

from protrain.hardware.calibration import calibrate
from protrain.hardware.calibration.contention import Together, groups_on, portions_of
from protrain.hardware.calibration.rates import (
    CPU,
    AdamChunk,
    Products,
    Transfers,
    adam_durations_s,
    best_threads,
    random_tensor,
    thread_counts,
)
from protrain.hardware.calibration.timing import Effort, durations_s, quintiles_of, rate
from protrain.hardware.detection import assume
from protrain.hardware.memory import usable_cores
from protrain.hardware.profile import RATE_UNITS, Contention, HardwareProfile
from protrain_kernels import padded

GIB = 1024**3
SECONDS = 0.25


@dataclass(frozen=True)
class Run:
    profile: HardwareProfile
    parts: list[tuple[str, float]]
    threads_restored: bool
    kept: bool


ONE_CALIBRATION = pytest.mark.xdist_group("calibration")  # which the tests of one process share


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    parts: list[tuple[str, float]] = []
    cache = tmp_path_factory.mktemp("cache")
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTRAIN_CACHE", str(cache))
        profile = calibrate("cpu", seconds=SECONDS, save=False, progress=lambda part, done: parts.append((part, done)))
    return Run(profile, parts, before == torch.get_num_threads(), (cache / "hardware").exists())


def test_beside_others_the_host_updates_parts_of_all_its_chunks_at_a_time() -> None:
    """The rate differs between them."""
    chunks = [AdamChunk.on(CPU, 4096) for _ in range(3)]
    portions = portions_of(chunks)
    before = [chunk.exp_avg.clone() for chunk in chunks]
    for index, portion in enumerate(portions):
        for part in portion:
            part.update()
        first, end = index * 1280, (index + 1) * 1280
        for chunk, was in zip(chunks, before, strict=True):
            assert not torch.equal(chunk.exp_avg[first:end], was[first:end])
            assert torch.equal(chunk.exp_avg[end:], was[end:])
    [[whole]] = portions_of(chunks[:1])
    assert whole.elements == 4096


def test_what_was_measured_together_leaves_no_memory_behind() -> None:
    """Though nobody collects: an activity may refer to all of them, as that of streamed updates does."""
    effort, chunk = _effort(seconds=0.01), AdamChunk.on(CPU, 4096)
    memory = weakref.ref(chunk.exp_avg)
    together = Together(CPU, effort, Products(CPU, effort), [chunk], threads=1)
    together._activities["itself"] = together.contention
    gc.collect()
    gc.disable()
    try:
        with together.ready():
            together.measure(("host_adam",), duration_s=0.01)
        del together, chunk
        assert memory() is None
    finally:
        gc.enable()


@ONE_CALIBRATION
@pytest.mark.slow
def test_everything_that_a_cpu_has_is_measured(on_cpu: Run) -> None:
    profile = on_cpu.profile
    assert (profile.source, profile.device_type, profile.driver) == ("measured", "cpu", "none")
    assert profile.torch_version == torch.__version__
    assumed = dict(assume(CPU).rows())
    rates = {name for name, _ in profile.rows() if name.endswith(RATE_UNITS)}
    assert rates > {name for name in assumed if name.endswith(RATE_UNITS)}
    assert {"host_adam_weight_gparams", "host_adam_narrow_gparams", "flatten_gbps", "pack_gbps"} < rates
    assert profile.host_adam_threads in thread_counts(usable_cores())
    assert profile.host_adam_p20_gparams is not None
    assert profile.host_adam_p20_gparams <= 1.01 * profile.host_adam_gparams
    assert profile.streamed_adam_gparams is profile.all_gather_gbps is None
    assert HardwareProfile.from_json(profile.to_json()) == profile


def test_the_weight_alone_is_measured_on_what_an_update_would_leave() -> None:
    chunk = AdamChunk.on(CPU, 1024)
    before, new_weight = [tensor.clone() for tensor in chunk], torch.zeros_like(chunk.weight)
    adam_durations_s([chunk], partial(AdamChunk.make_weight, new_weight=new_weight), CPU, budget_s=0.01)
    assert all(map(torch.equal, chunk, before))
    assert not torch.equal(chunk.weight, new_weight)
    chunk.update()
    assert torch.equal(chunk.weight, new_weight)


def test_moments_in_bf16_are_measured_on_bf16() -> None:
    chunk = AdamChunk.on(CPU, 1024)
    moments = torch.zeros(1024, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.bfloat16)
    before = [tensor.clone() for tensor in chunk]
    adam_durations_s([chunk], partial(AdamChunk.update, moments=moments), CPU, budget_s=0.01)
    same = {name: torch.equal(getattr(chunk, name), was) for name, was in zip(chunk._fields, before, strict=True)}
    assert same == {"weight": False, "master": False, "exp_avg": True, "exp_avg_sq": True, "grad": True}
    assert all(moment.count_nonzero() for moment in moments)


@ONE_CALIBRATION
def test_what_runs_together_is_measured_together(on_cpu: Run) -> None:
    groups = {group.activities: group.shares for group in on_cpu.profile.contention}
    assert list(groups) == [group for group in groups_on(CPU) if len(group) > 1]
    assert ("h2d", "d2h", "host_adam", "matmul") in groups
    everything = groups["h2d", "d2h", "host_adam", "matmul"]
    # Four activities that each keep a core or more busy can't all go on as if they were alone.
    assert all(share > 0 for shares in groups.values() for share in shares)
    assert min(everything) < 0.95


@ONE_CALIBRATION
def test_progress_reaches_the_end_and_settings_come_back(on_cpu: Run) -> None:
    done = [share for _, share in on_cpu.parts]
    assert done == sorted(done)
    assert done[0] == 0.0
    assert on_cpu.parts[-1] == ("done", 1.0)
    assert done[-2] > 0.9, "the last stage starts near the end"
    assert on_cpu.threads_restored
    assert not on_cpu.kept, "save=False"


@ONE_CALIBRATION
def test_small_sizes_are_told(on_cpu: Run) -> None:
    assert any("so little time that tensors of" in line for line in on_cpu.profile.warnings)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_duration_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be more than 0, not"):
        calibrate("cpu", seconds=seconds)


def test_a_device_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a CUDA GPU or the CPU, not meta"):
        calibrate("meta")


def test_a_share_is_that_of_the_most_crowded_group_known() -> None:
    groups = (
        Contention(activities=("h2d", "host_adam"), shares=(0.8, 0.9)),
        Contention(activities=("h2d", "d2h", "host_adam"), shares=(0.6, 0.7, 0.5)),
    )
    profile = HardwareProfile.from_dict({**PLAIN.to_dict(), "contention": [group.to_dict() for group in groups]})
    assert profile.share("h2d", ["host_adam"]) == 0.8
    assert profile.share("host_adam", ["h2d", "d2h", "matmul"]) == 0.5
    assert profile.share("h2d", []) == profile.share("matmul", ["h2d"]) == 1.0


PLAIN = HardwareProfile(
    name="a card",
    device_type="cuda",
    device_bytes=GIB,
    host_bytes=GIB,
    cpu_threads=4,
    matmul_tflops=1.0,
    device_copy_gbps=1.0,
    h2d_gbps=1.0,
    d2h_gbps=1.0,
    bidirectional_gbps=1.0,
    host_dram_gbps=1.0,
    host_adam_gparams=1.0,
    device_adam_gparams=1.0,
    source="measured",
)


def test_a_fifth_of_the_samples_lies_below_and_above_the_quintiles() -> None:
    assert quintiles_of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == (2.0, 5.0)
    assert quintiles_of([7.0]) == (7.0, 7.0)


def test_a_rate_is_work_over_time() -> None:
    durations = durations_s(lambda: time.sleep(0.005), CPU, budget_s=0.05)
    assert len(durations) >= 5
    assert min(durations) >= 0.005
    assert rate(lambda: time.sleep(0.005), CPU, 10.0, budget_s=0.05) == pytest.approx(10 / median(durations), rel=0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16, torch.uint8])
def test_what_is_measured_on_is_random(dtype: torch.dtype) -> None:
    tensor = random_tensor(3_000_001, dtype, CPU)
    assert tensor.numel() == 3_000_001
    for piece in (tensor[:1000], tensor[1_500_000:1_501_000], tensor[-1000:]):
        assert piece.unique().numel() > 100
        assert torch.count_nonzero(piece) > 950
    assert random_tensor(1000, torch.float32, CPU, positive=True).min() >= 0


def test_a_chunk_is_updated_by_its_step() -> None:
    chunk = AdamChunk.on(CPU, 1024)
    before = chunk.weight.float() * 65536 + chunk.master.float()
    chunk.update(threads=1)
    after = chunk.weight.float() * 65536 + chunk.master.float()
    assert torch.isfinite(chunk.exp_avg).all()
    assert (before != after).float().mean() > 0.9


def test_thread_counts_and_the_fewest_that_are_best() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(1, taken=1) == [1]
    assert thread_counts(4) == [1, 2, 3, 4]
    assert thread_counts(16) == [1, 2, 4, 8, 15, 16]
    assert thread_counts(16, taken=1) == [1, 2, 4, 8, 14, 15]
    assert best_threads({1: 1 / 1.0, 2: 1 / 1.9, 4: 1 / 2.95, 8: 1 / 3.0}) == 4


def test_the_hosts_chunks_are_many_where_memory_is() -> None:
    assert Effort(seconds=30.0, host_room_bytes=120 * GIB, device_room_bytes=80 * GIB).host_chunks == 12
    assert Effort(seconds=30.0, host_room_bytes=30 * GIB, device_room_bytes=80 * GIB).host_chunks == 3
    assert Effort(seconds=30.0, host_room_bytes=2 * GIB, device_room_bytes=80 * GIB).host_chunks == 1
    assert Effort(seconds=1.0, host_room_bytes=120 * GIB, device_room_bytes=80 * GIB).host_chunks == 1


def test_a_rate_counts_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[int] = []

    def update(chunk: AdamChunk, threads: int = 0, moments: object = None) -> None:
        updated.append(id(chunk))

    def three_times_30_ms(run: Callable[[], None], device: torch.device, *, budget_s: float) -> list[float]:
        run()
        return [0.03] * 3

    monkeypatch.setattr(AdamChunk, "update", update)
    monkeypatch.setattr("protrain.hardware.calibration.rates.durations_s", three_times_30_ms)
    chunks = [AdamChunk.on(CPU, elements) for elements in (128, 256, 128)]
    assert adam_durations_s(chunks, AdamChunk.update, CPU, budget_s=0.1) == [0.03] * 3
    assert updated == [id(chunk) for chunk in chunks]


def _effort(seconds: float = 30.0, host_gib: float = 64.0, device_gib: float = 64.0) -> Effort:
    return Effort(seconds=seconds, host_room_bytes=int(host_gib * GIB), device_room_bytes=int(device_gib * GIB))


def test_sizes_go_with_time_and_room() -> None:
    full = _effort()
    assert full.transfer_bytes == [size * 1024**2 for size in (64, 128, 256)], "what no cache holds"
    assert full.tensor_bytes == GIB
    shrink: list[Callable[[], Effort]] = [
        lambda: _effort(seconds=3.0),
        lambda: _effort(host_gib=1.2),
        lambda: _effort(device_gib=1.2),
    ]
    for make in shrink:
        assert make().size == pytest.approx(0.1)
        assert make().transfer_bytes[-1] == 16 * 1024**2
    assert _effort(seconds=90.0).size == 1.0
    tiny = _effort(seconds=0.001)
    assert (tiny.transfer_bytes, tiny.hidden, tiny.tensor_bytes) == ([1024**2], 128, 1024**2)
    assert padded(tiny.adam_elements) == tiny.adam_elements


@pytest.mark.parametrize(("tflops", "width"), [(1.0, 1024), (0.03, 1024), (0.003, 512), (1e-9, 256)])
def test_products_are_smaller_on_a_slow_device(monkeypatch: pytest.MonkeyPatch, tflops: float, width: int) -> None:
    def seconds(run: Callable[[], None], device: torch.device, runs: int) -> float:
        return 2 * cast(Products, cast(MethodType, run).__self__).width ** 3 / tflops / 1e12

    monkeypatch.setattr("protrain.hardware.calibration.rates.batch_s", seconds)
    products = Products(CPU, _effort())
    assert products.width == width
    products.run()


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    begin = time.perf_counter()
    measured = calibrate("cuda", save=False)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # with other tests beside it, it takes longer
        assert time.perf_counter() - begin < 60
    assert measured.device_type == "cuda"
    assert measured.matmul_tflops > 10
    assert measured.h2d_gbps < measured.device_copy_gbps
    assert measured.bidirectional_gbps < 1.1 * (measured.h2d_gbps + measured.d2h_gbps)
    # By a factor: other processes may share the GPU.
    assert 0.4 < measured.device_adam_gparams * 26 / measured.device_copy_gbps < 2.5
    assert measured.streamed_adam_gparams is not None
    assert 0 < measured.streamed_adam_gparams < measured.device_adam_gparams
    found = {group.activities for group in measured.contention}
    assert found == {group for group in groups_on(torch.device("cuda")) if len(group) > 1}
    assert 0.2 < measured.share("host_adam", ["h2d", "d2h"]) < 1.05
    assert measured.share("matmul", ["h2d", "d2h"]) > 0.7


def test_copies_take_regions_of_the_hosts_memory_in_turn() -> None:
    transfers = Transfers(CPU, 4096, regions=3)
    sources, targets, (near, far) = transfers.host[:3], transfers.host[3:], transfers._far
    for source in (*sources, sources[0]):
        near.zero_()
        transfers.up()
        assert torch.equal(near, source)
    for target in targets:
        assert not torch.equal(target, far)
    for _ in targets:
        transfers.down()
    for target in targets:
        assert torch.equal(target, far)
