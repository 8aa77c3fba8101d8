"""A row is checked before it is timed, a wrong one has no figure, and pytest-benchmark holds the times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from bench.kernels import recorder as recorders
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import Roofs
from bench.kernels.rows import Row
from bench.kernels.timing import ColdCache

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")


class _Roofs(Roofs):
    def __init__(self) -> None:
        pass

    def measured_gbps(self, roof: str) -> float:
        return 100.0

    def datasheet_gbps(self, roof: str) -> float | None:
        return None


class _Cold(ColdCache):
    def __init__(self) -> None:
        self.covered_s = 0.0
        self.calls = 0

    def cover(self, host_s: float) -> None:
        self.covered_s = host_s

    def __call__(self) -> None:
        self.calls += 1


def _measure(recorder: Recorder, **fields: Any) -> None:
    values: dict[str, Any] = {
        **{"operator": "add", "shape": "a block", "dtype": "float32", "implementation": "protrain"},
        **{"roof": "device copy", "bytes_moved": 4096, "run": lambda: None, "check": lambda: "bits equal"},
    }
    recorder.measure(**(values | fields))


@pytest.fixture
def enabled(benchmark: Any) -> Any:
    """pytest-benchmark as it is without xdist, which disables it."""
    benchmark.disabled = False
    return benchmark


@pytest.fixture
def no_gpu_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(recorders, "_device_extra_bytes", lambda run: 7)


def test_a_wrong_result_has_no_figure(enabled: Any) -> None:
    rows: list[Row] = []
    ran: list[int] = []

    def check() -> str:
        raise AssertionError("half of it\nis off")

    recorder = Recorder(enabled, rows, _Roofs(), _Cold(), budget_s=0.01)
    with pytest.raises(pytest.fail.Exception, match="wrong, so it has no figure: RED: half of it is off"):
        _measure(recorder, run=lambda: ran.append(1), check=check)
    assert (rows[0].red, rows[0].median_ms, ran) == (True, None, [])


def test_without_a_gpu_nothing_is_timed(enabled: Any) -> None:
    rows: list[Row] = []
    _measure(Recorder(enabled, rows, None, None, budget_s=0.01))
    assert (rows[0].verdict, rows[0].median_ms, rows[0].machine.gpu) == ("bits equal", None, "none")


@pytest.mark.usefixtures("no_gpu_calls")
def test_figures_come_from_the_benchmark_behind_a_cold_cache(enabled: Any) -> None:
    rows: list[Row] = []
    cold = _Cold()
    values = torch.zeros(1024)
    _measure(Recorder(enabled, rows, _Roofs(), cold, budget_s=0.001), run=lambda: values.add_(1.0))
    (row,) = rows
    stats = enabled.stats.stats
    assert row.median_ms == stats.median * 1e3
    assert row.median_ms is not None
    assert stats.min * 1e3 <= (row.p20_ms or 0) <= row.median_ms <= (row.p80_ms or 0) <= stats.max * 1e3
    assert row.rounds == stats.rounds >= 9
    assert cold.calls == row.rounds + 2  # once before each round, warming up or not
    assert cold.covered_s == pytest.approx(2e-6 * (row.host_us or 0))
    assert (row.extra_memory_bytes, row.roof_gbps) == (7, 100.0)
    assert enabled.extra_info["gbps"] == row.gbps


@pytest.mark.usefixtures("no_gpu_calls")
def test_a_limit_is_timed_in_turns_and_is_the_roof(enabled: Any) -> None:
    rows: list[Row] = []
    cold = _Cold()
    turns: list[str] = []

    def limit() -> None:
        turns.append("limit")
        time.sleep(0.004)

    recorder = Recorder(enabled, rows, _Roofs(), cold, budget_s=0.001)
    _measure(recorder, roof="its products", run=lambda: turns.append("run"), limit=limit, bytes_moved=8_000_000)
    (row,) = rows
    rounds = row.rounds + 2  # with those that warm up
    assert turns[-2 * rounds :] == ["limit", "run"] * rounds
    assert turns.count("limit") == rounds
    assert cold.calls == 2 * rounds
    assert row.roof_gbps is not None
    assert 0.4 < row.roof_gbps < 2.0  # 8 MB in the 4 ms that it takes at least
    assert (row.roof, row.datasheet_gbps) == ("its products", None)


@pytest.mark.usefixtures("no_gpu_calls")
def test_host_work_takes_the_thread_count_that_suits_it(enabled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    before = torch.get_num_threads()
    counts: list[int] = []
    monkeypatch.setattr(recorders, "best_threads", lambda run: before + 3)
    recorder = Recorder(enabled, rows, _Roofs(), None, budget_s=0.001)
    _measure(recorder, on_host=True, tune_threads=True, run=lambda: counts.append(torch.get_num_threads()))
    assert set(counts) == {before + 3}
    assert torch.get_num_threads() == before
    assert rows[0].note == f"{before + 3} threads, the fastest count"
    assert rows[0].host_us is None
