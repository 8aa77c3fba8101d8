"""Checks, times and records one implementation; what every benchmark goes through."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bench.clock import device_timer
from bench.kernels.roofs import Roofs
from bench.kernels.rows import OURS, Row, this_machine
from bench.kernels.timing import ColdCache, best_threads, host_timer

ON_HOST = pytest.mark.benchmark(timer=host_timer, disable_gc=True)  # of tests that the host's clock times
_LEAST_ROUNDS, _MOST_ROUNDS = 9, 100
_LONG_RUN_S, _LONG_ROUNDS = 0.25, 5
_WARMUP_ROUNDS = 2
_HOST_CALLS, _HOST_BUDGET_S = 200, 0.25  # that the host's clock times
_CALLS_AT_ONCE, _AT_ONCE_S = 10, 0.5e-3  # of those; some hundred launches at most, of the 1024 that a queue holds


class Recorder:
    """Records one row. ``timed`` is False without a GPU: then only correctness is checked.

    Attributes:
        device: where the operators run.
        timed: whether figures are taken.
    """

    def __init__(
        self, benchmark: Any, rows: list[Row], roofs: Roofs | None, cold: ColdCache | None, *, budget_s: float
    ) -> None:
        self.device = torch.device("cpu" if roofs is None else "cuda")
        self.timed = roofs is not None and benchmark.enabled
        self._benchmark = benchmark
        self._rows = rows
        self._roofs = roofs
        self._cold = cold
        self._budget_s = budget_s

    def measure(
        self,
        *,
        operator: str,
        shape: str,
        dtype: str = "bfloat16",
        implementation: str,
        version: str | None = None,
        roof: str,
        bytes_moved: int,
        flops: int = 0,
        on_host: bool = False,
        tune_threads: bool = False,
        run: Callable[[], object],
        check: Callable[[], str],
        limit: Callable[[], object] | None = None,
        note: str = "",
    ) -> None:
        """Check, then time ``run``, and keep the row.

        Args:
            operator: what is computed; with ``shape`` and ``dtype`` it names the group that peers share.
            shape: named after a model.
            dtype: of the data.
            implementation: who computes it.
            version: of the package that brings it; None: none for ours, else torch's.
            roof: what limits the operator, a name of ``roofs``, or the name of ``limit``.
            bytes_moved: what the operator has to read and write, the same for every implementation.
            flops: floating-point operations of one call.
            on_host: whether the host's clock counts, of a test marked ``ON_HOST``; no cache is emptied then.
            tune_threads: whether to time ``run`` with the count of torch's threads that suits it best.
            run: one call.
            check: says how the results agree with the reference, or raises AssertionError saying how they don't.
            limit: work on the device that no implementation can do without. It is timed in turns with ``run``, as the
                clock of a device that multiplies matrices depends on what it does, and makes the roof of the row.
            note: what else there is to say.
        """
        if version is None:
            version = "" if implementation == OURS else torch.__version__
        row: dict[str, Any] = {
            **{"operator": operator, "shape": shape, "dtype": dtype, "implementation": implementation},
            **{"version": version, "bytes": bytes_moved, "flops": flops, "roof": roof, "note": note},
            "machine": this_machine(),
        }
        self._benchmark.group = f"{operator}: {shape}, {dtype}"
        try:
            row["verdict"] = check()
        except AssertionError as error:
            row["verdict"] = f"RED: {' '.join(str(error).split())}"
        if row["verdict"].startswith("RED"):
            self._rows.append(Row(**row))
            self._skip_timing()
            pytest.fail(f"{implementation} is wrong, so it has no figure: {row['verdict']}", pytrace=False)
        if not self.timed:
            self._rows.append(Row(**row))
            self._skip_timing()  # the check has called it
            return
        assert self._roofs is not None
        if limit is None:
            row["roof_gbps"] = self._roofs.measured_gbps(roof)
        threads = best_threads(run) if tune_threads else torch.get_num_threads()
        with _torch_threads(threads):
            row |= self._figures(run, on_host, limit, bytes_moved)
        if tune_threads:
            row["note"] = f"{note}{'; ' if note else ''}{threads} threads, the fastest count"
        row["datasheet_gbps"] = self._roofs.datasheet_gbps(roof)
        done = Row(**row)
        self._rows.append(done)
        self._benchmark.extra_info.update(done.flat())

    def _skip_timing(self) -> None:
        self._benchmark.disabled = True
        self._benchmark.pedantic(lambda: None)

    def _figures(
        self, run: Callable[[], object], on_host: bool, limit: Callable[[], object] | None, bytes_moved: int
    ) -> dict[str, Any]:
        run()  # compiles
        torch.cuda.synchronize()
        extra = None if on_host else _device_extra_bytes(run)
        host_s = None if on_host else _host_seconds(run)
        if host_s is not None and self._cold is not None:
            self._cold.cover(2 * host_s)
        before_run = _Turns(limit, self._cold)
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        self._benchmark.pedantic(
            run,
            setup=None if on_host else before_run,
            rounds=self._rounds(time.perf_counter() - begin),
            warmup_rounds=_WARMUP_ROUNDS,
        )
        stats = self._benchmark.stats.stats
        p20_s, p80_s = np.quantile(stats.data, (0.2, 0.8)).tolist()
        return {
            "median_ms": stats.median * 1e3,
            "p20_ms": p20_s * 1e3,
            "p80_ms": p80_s * 1e3,
            "rounds": len(stats.data),
            "host_us": None if host_s is None else host_s * 1e6,
            "extra_memory_bytes": extra,
            **({} if limit is None else {"roof_gbps": bytes_moved / before_run.limit_s() / 1e9}),
        }

    def _rounds(self, run_s: float) -> int:
        least = _LONG_ROUNDS if run_s > _LONG_RUN_S else _LEAST_ROUNDS
        return int(min(max(self._budget_s / run_s, least), _MOST_ROUNDS))


class _Turns:
    """Called before each round: does and times the work that limits the operator, if any, and empties the cache."""

    def __init__(self, limit: Callable[[], object] | None, cold: ColdCache | None) -> None:
        self._limit = limit
        self._cold = cold
        self._instants: list[tuple[Any, Any]] = []  # before and after; to subtract them waits for the device

    def __call__(self) -> None:
        if self._limit is not None:
            self._empty_cache()
            start = device_timer()
            self._limit()
            self._instants.append((start, device_timer()))
        self._empty_cache()

    def limit_s(self) -> float:
        """The median time of the limiting work."""
        durations = sorted(end - start for start, end in self._instants)
        return float(durations[len(durations) // 2])

    def _empty_cache(self) -> None:
        if self._cold is not None:
            self._cold()


@contextlib.contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _host_seconds(run: Callable[[], object]) -> float:
    """Median time until a call of ``run`` returns: of calls one after another, as in a step.

    A few at a time, so that the device's queue, which would hold the host back, never fills. The first of them, by a
    host that has waited and to a device that idles, counts as one: alone it would say more about waiting.
    """
    durations: list[float] = []
    while len(durations) < _LONG_ROUNDS or (sum(durations) < _HOST_BUDGET_S and len(durations) < _HOST_CALLS):
        torch.cuda.synchronize()
        first = before = time.perf_counter()
        for _ in range(_CALLS_AT_ONCE):
            run()
            after = time.perf_counter()
            durations.append(after - before)
            before = after
            if after - first > _AT_ONCE_S:
                break
    torch.cuda.synchronize()
    return sorted(durations)[len(durations) // 2]


def _device_extra_bytes(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
