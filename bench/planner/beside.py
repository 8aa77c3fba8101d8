"""Runs several cases at once on one device, if their memory limits allow. This is for runs that are not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from bench.planner.cases import Case
from protrain.common.tables import parse_memory

Result = TypeVar("Result")

_PROCESS_BYTES = 2**30  # device memory of a context and its kernels, beside the limit of a case


def beside_each_other(
    cases: Sequence[Case], run: Callable[[Case], Result], *, jobs: int, device_bytes: int
) -> Iterator[tuple[Case, Result]]:
    """Yield the result of ``run`` for each case, in the order in which they end. At most ``jobs`` run at once.

    A case begins when its limit, and a process's own needs, fit beside those that run, or when none runs.
    """
    waiting, running = list(cases), dict[Future[Result], Case]()
    with ThreadPoolExecutor(jobs) as threads:
        while waiting or running:
            for case in list(waiting):
                free = device_bytes - sum(_bytes(other, device_bytes) for other in running.values())
                if len(running) < jobs and (not running or _bytes(case, device_bytes) <= free):
                    waiting.remove(case)
                    running[threads.submit(run, case)] = case
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                yield running.pop(one), one.result()


def _bytes(case: Case, device_bytes: int) -> int:
    """The device memory that ``case`` may take."""
    if case.device_memory is None:
        return device_bytes
    return min(device_bytes, parse_memory(case.device_memory, name="device_memory") + _PROCESS_BYTES)
