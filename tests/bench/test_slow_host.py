"""The benchmark of slow hosts measures what it says, goes on where it ended, and compares what can be compared."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from bench.planner import slow_host
from bench.planner.by_hand import moves
from bench.planner.largest import profile_of
from bench.planner.slow_host import FILE, SHARES, hosts_of, main
from bench.planner.slow_host_record import Floor, Host, Row, SlowHost
from protrain.common.errors import PlanError
from protrain.hardware.shipped import load
from protrain.planning import check, evaluate

GIB = 1024**3


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's case for a GPU takes minutes. Here few tokens are trained, and one plan is tried by hand."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(slow_host, "TRIAL", replace(slow_host.TRIAL, sequence=16))
    monkeypatch.setattr(slow_host, "UNTIMED", 1)
    monkeypatch.setattr(slow_host, "moves", lambda *args, **options: islice(moves(*args, **options), 1))


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu", "profiled_once")
def test_a_run_is_recorded_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "2", "--switch-every", "2", "--out", str(tmp_path)]
    assert main([*options, "--time-limit", "0"]) == 0
    begun = SlowHost.load(tmp_path / FILE)
    assert begun.measured == begun.floors == ()
    assert begun.tried[0].shares == (1.0, *SHARES)
    assert main(options) == 0
    record = SlowHost.load(tmp_path / FILE)
    assert record.tried == begun.tried
    assert len(record.commands) == 2
    # Every plan on every host that it is for, each once.
    found = [(row.tried, row.host) for row in record.measured]
    assert found == [(index, host) for index in range(len(record.tried)) for host in hosts_of(record, index)]
    assert [(host.share, host.after) for host in hosts_of(record, 0)] == [
        *((1.0, None), (0.7, None), (0.5, None)),
        *((0.7, 1.0), (1.0, 0.7), (0.5, 1.0), (1.0, 0.5)),
    ]
    for row in record.measured:
        assert len(row.timed_ms) == 2
        assert row.untimed == (slow_host.UNTIMED if row.host.after is None else 0)
        assert min(row.step_ms) > 0
        assert row.host_gparams > 0
        assert row.redone_updates == 0, "no step is clipped"
    assert [floor.share for floor in record.floors] == [1.0, *SHARES]
    printed = capsys.readouterr().out
    assert all(tried.name in printed for tried in record.tried)
    with pytest.raises(SystemExit, match="choose another --out"):
        main(["--steps", "3", "--out", str(tmp_path)])


@pytest.mark.usefixtures("on_cpu", "profiled_once")
def test_the_table_begins_with_the_slowest_host(tmp_path: Path) -> None:
    assert main(["--steps", "1", "--switch-every", "0", "--out", str(tmp_path), "--time-limit", "0"]) == 0
    record = SlowHost.load(tmp_path / FILE)
    first = record.tried[0]
    record = replace(record, tried=(replace(first, name="one"), replace(first, name="other")))
    times = {(0, 1.0): 100.0, (0, 0.7): 120.0, (0, 0.5): 160.0, (1, 0.7): 110.0, (1, 0.5): 200.0}
    record = replace(
        record,
        measured=tuple(_row(tried, Host(share=share), step_ms) for (tried, share), step_ms in times.items()),
        floors=(Floor(share=1.0, step_ms=(500.0, 90.0), untimed=1), Floor(share=0.7, step_ms=(95.0,), untimed=0)),
    )
    record = replace(
        record, measured=(*record.measured, _row(0, Host(share=0.7, after=1.0), 1.0, (130.0, 110.0, 141.0)))
    )
    lines = [line.split() for line in record.table().splitlines()[3:]]
    # The percentage is of the floor without load; the mean counts where the load is switched.
    assert [line[:2] for line in lines] == [
        *(["50%", "one"], ["50%", "other"], ["70%", "after"], ["70%", "one"], ["70%", "other"], ["100%", "one"]),
        *(["70%", "floor"], ["100%", "floor"]),
    ]
    assert [line[6:8] for line in lines if line[1] in ("one", "other")] == [
        *(["56.2%", "+0.0%"], ["45.0%", "+25.0%"], ["75.0%", "+9.1%"], ["81.8%", "+0.0%"], ["90.0%", "+0.0%"])
    ]
    assert "127.0 (110.0 to 141.0)" in record.table()


def _row(tried: int, host: Host, step_ms: float, times: tuple[float, ...] = ()) -> Row:
    return Row(
        tried=tried,
        host=host,
        step_ms=times or (999.0, step_ms),
        untimed=0 if times else 1,
        predicted_ms=step_ms,
        host_gparams=3.0,
        streamed_updates=4,
        speculative_updates=2,
        redone_updates=0,
        compiled_graphs=1,
    )


def test_the_other_integer_follows_a_move_as_far_as_memory_allows() -> None:
    profile = profile_of("llama-7b", 8, batch=8, sequence=2048)
    hardware = replace(load("h100"), device_bytes=28 * GIB, host_bytes=60 * GIB)
    plan = evaluate(profile, hardware, n_persist=3, n_buffer=3, n_swap=0, n_ckpt=5, n_speculate=5, stream=True)
    found = dict(moves(plan, profile, hardware))
    assert {name: (moved.n_persist, moved.n_ckpt, moved.stream) for name, moved in found.items()} == {
        "n_persist -2": (1, 4, True),
        "n_persist +2": (5, 7, True),
        "n_ckpt -2": (0, 3, True),
        "n_ckpt +2": (5, 7, True),
        "no streamed updates": (3, 5, False),
    }
    for moved in found.values():
        assert moved.n_buffer >= plan.n_buffer
        assert check(moved, profile, hardware) == moved
    with pytest.raises(PlanError):  # one block fewer is too few
        evaluate(profile, hardware, n_persist=1, n_buffer=3, n_swap=0, n_ckpt=3, n_speculate=5, stream=True)
    with pytest.raises(PlanError):  # one chunk more is too many
        evaluate(profile, hardware, n_persist=6, n_buffer=3, n_swap=0, n_ckpt=7, n_speculate=4, stream=True)
