"""What activities leave each other when they run together, and that all end when one does."""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import time

import pytest

from protrain.hardware.calibration.contention import Unit, best_shares, units_per_second
from protrain.hardware.profile import Contention


def _naps(lock: threading.Lock | None = None) -> Unit:
    """Units of 10 ms that cost no core, so that a busy machine disturbs them little."""

    def run() -> None:
        with lock if lock is not None else contextlib.nullcontext():
            time.sleep(0.01)
        time.sleep(0.001)  # lets the other have the lock

    return run


def test_what_shares_nothing_keeps_its_rate_and_what_shares_all_has_half() -> None:
    found = []
    for _ in range(10):  # a busy machine may end naps late in one of the three, hardly in all of ten
        alone = units_per_second({"a": _naps()}, duration_s=0.4)["a"]
        apart = units_per_second({"a": _naps(), "b": _naps()}, duration_s=0.4)
        lock = threading.Lock()
        shared = units_per_second({"a": _naps(lock), "b": _naps(lock)}, duration_s=0.4)
        found.append((alone, apart, shared))
        if (
            30 < alone < 91
            and min(apart.values()) > 0.75 * alone
            and 0.35 * alone < min(shared.values()) <= max(shared.values()) < 0.72 * alone
        ):
            return
    pytest.fail(f"never a half of what is shared, and all of what is not: {found}")


def test_of_two_runs_of_a_group_the_better_counts() -> None:
    found = {
        ("a",): [{"a": 10.0}, {"a": 8.0}],  # something else slowed the machine down in the second round
        ("b",): [{"b": 2.0}, {"b": 4.0}],
        ("a", "b"): [{"a": 5.0, "b": 2.0}, {"a": 7.0, "b": 1.6}],
    }
    assert best_shares(found) == [Contention(activities=("a", "b"), shares=(0.7, 0.4))]


def test_an_activity_that_fails_ends_all() -> None:
    def fail() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        units_per_second({"a": _naps(), "b": fail}, duration_s=60.0)
    runs: list[int] = []

    def fail_later() -> None:
        runs.append(1)
        if len(runs) > 5:
            raise RuntimeError("later")

    with pytest.raises(RuntimeError, match="later"):
        units_per_second({"a": _naps(), "b": fail_later}, duration_s=60.0)


@pytest.mark.slow
def test_an_interruption_ends_all() -> None:
    """Nothing may still copy what is unpinned next."""
    before = threading.enumerate()
    runs: list[int] = []

    def interrupt() -> None:
        runs.append(1)
        time.sleep(0.01)
        if len(runs) == 5:
            _thread.interrupt_main()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            units_per_second({"a": _naps(), "b": interrupt}, duration_s=60.0)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert threading.enumerate() == before


def test_a_thread_that_cannot_start_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start = threading.enumerate(), threading.Thread.start
    started: list[threading.Thread] = []

    def refuse_the_second(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    with pytest.raises(RuntimeError, match="new thread"):
        units_per_second({"a": _naps(), "b": _naps()}, duration_s=60.0)
    assert threading.enumerate() == before
