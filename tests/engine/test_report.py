"""The report of a training as people read it."""

from __future__ import annotations

from dataclasses import replace

from protrain.engine.report import Report

REPORT = Report(
    plan="n_persist=1/4",
    steps=1234,
    step_ms=2040.0,
    predicted_step_ms=2000.0,
    device_bytes=3 * 2**30,
    predicted_device_bytes=4 * 2**30,
    host_bytes=20 * 2**20,
    predicted_host_bytes=21 * 2**20,
    fetches=24680,
    uploaded_bytes=3 * 2**40,
    received_bytes=0,
    sent_bytes=0,
    speculative_updates=30,
    redone_updates=2,
    streamed_updates=3,
    host_gparams=4.0,
    predicted_host_gparams=5.0,
)


def test_a_printed_report_is_aligned_lines_with_units() -> None:
    assert str(REPORT).splitlines() == [
        "plan                 n_persist=1/4",
        "steps                1,234",
        "time of a step       2.04 s in the median, predicted 2 s (measured +2.0%)",
        "device memory        3 GiB at its peak, predicted 4 GiB",
        "host memory          20 MiB taken, predicted 21 MiB",
        "chunk uploads        24,680, 3 TiB from host memory",
        "speculative updates  30, 2 of them done again",
        "streamed updates     3",
        "AdamW on the host    4.00 G param/s, predicted 5.00 (measured -20.0%)",
    ]
    assert Report.from_json(REPORT.to_json()) == REPORT
    several = replace(REPORT, received_bytes=2 * 2**40, sent_bytes=2**40)
    assert "between ranks        2 TiB of weights received, 1 TiB of gradients sent" in str(several).splitlines()


def test_a_step_that_waits_for_a_slow_host_comes_with_the_remedy() -> None:
    remedy = (
        "(measured -20.0%); `protrain calibrate`, while the machine is as busy as now, for plans that leave it less"
    )
    assert " ".join(str(replace(REPORT, step_ms=2200.0)).split()).endswith(remedy)
    for other in (replace(REPORT, step_ms=2080.0), replace(REPORT, step_ms=2200.0, host_gparams=4.4)):
        assert "calibrate" not in str(other)


def test_a_step_that_was_not_measured_is_said_to_be_so() -> None:
    lines = str(replace(REPORT, steps=1, step_ms=0.0, redone_updates=0, host_gparams=0.0)).splitlines()
    assert lines[2].endswith("not measured before two steps, predicted 2 s")
    assert lines[-3].endswith(" 30")
    assert lines[-1].endswith(" none")
