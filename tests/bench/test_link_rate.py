"""``--link-rate`` of bench.train and bench.planner: all runs beside copies on the links between host and GPUs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bench import link_load
from bench.link_load import LinkLoad, Rates, SlowLink, beside_copies
from bench.loaders import LoadError
from bench.planner import __main__ as planner
from bench.planner.results import Results
from bench.train.__main__ import main
from bench.train.contestants import Contestant
from bench.train.results import Comparison, Outcome
from bench.train.task import Task
from protrain.common.cache import cache_folder


class Machine:
    """Two GPUs, whose links loaders and probes share evenly. That of the second is slower."""

    gbps: ClassVar[dict[int, float]] = {0: 48.0, 1: 45.0}
    gpus: ClassVar[list[int]]
    loaders: ClassVar[float]
    events: ClassVar[list[str]]


class Loaders:
    def __init__(self, prepare: Callable[..., object], most: int, *, each: Sequence[tuple[int, bool]]) -> None:
        Machine.gpus = [gpu for gpu, up in each if up]
        assert Machine.gpus == [gpu for gpu, up in each if not up], "as many copy down"

    @contextmanager
    def running(self, loaders: float) -> Iterator[None]:
        Machine.loaders = loaders
        yield
        Machine.loaders = 0.0

    def close(self, *, beyond: float = 0.0) -> None:
        Machine.events.append(f"loaders beyond {beyond:.1f} closed")


class Probes:
    def __init__(self, prepare: Callable[..., object], each: Sequence[tuple[int]]) -> None:
        assert [gpu for (gpu,) in each] == Machine.gpus, "all GPUs are measured at once"

    def measure(self) -> list[Rates]:
        of_compute = 1 - Machine.loaders / 100
        return [Rates(Machine.gbps[gpu] / (1 + Machine.loaders), 700 * of_compute) for gpu in Machine.gpus]

    def close(self) -> None:
        Machine.events.append("probes closed")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> type[Machine]:
    Machine.loaders, Machine.events = 0.0, []
    monkeypatch.setattr(link_load, "Loaders", Loaders)
    monkeypatch.setattr(link_load, "Probes", Probes)
    return Machine


@pytest.mark.parametrize(("gpus", "alone"), [(1, 48.0), (2, 45.0)])
def test_the_slowest_link_keeps_the_wanted_rate(
    gpus: int, alone: float, machine: type[Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path))
    with beside_copies(16.0, gpus) as found:
        assert found is not None
        assert machine.loaders == found.loaders == pytest.approx(alone / 16 - 1, abs=0.05)
        assert (found.wanted_gbps, found.alone_gbps) == (16.0, alone)
        assert found.loaded_gbps == pytest.approx(16.0, abs=0.3)
        assert found.compute_share == pytest.approx(1 - found.loaders / 100)
        assert machine.events == ["probes closed", f"loaders beyond {found.loaders:.1f} closed"]
        folder = cache_folder()
        assert folder != tmp_path
        assert not list(folder.iterdir()), "the machine is to be calibrated beside the load"
    assert cache_folder() == tmp_path
    assert not folder.exists()
    assert not list(tmp_path.iterdir())
    assert machine.loaders == 0.0
    assert machine.events[-1] == "loaders beyond 0.0 closed"


def test_without_a_wanted_rate_nothing_changes(machine: type[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROTRAIN_CACHE")
    with beside_copies(None, 2) as found:
        assert found is None
        assert "PROTRAIN_CACHE" not in os.environ
    assert not machine.events
    with beside_copies(16.0, 1):
        assert "PROTRAIN_CACHE" in os.environ
    assert "PROTRAIN_CACHE" not in os.environ


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (60.0, "--link-rate 60: the link has 48.0 GB/s each way without any load"),
        (2.0, "--link-rate 2: no load leaves that. 5.95 loaders a GPU leave copies 6.9 of 48.0 GB/s each way"),
    ],
)
def test_a_rate_that_no_load_leaves_is_refused(wanted: float, said: str, machine: type[Machine]) -> None:
    with pytest.raises(LoadError, match=said), beside_copies(wanted, 1):
        raise AssertionError("there is no such load")
    assert machine.events == ["probes closed", "loaders beyond 0.0 closed"]


def test_an_error_beside_the_load_ends_it(machine: type[Machine]) -> None:
    before = os.environ["PROTRAIN_CACHE"]
    with pytest.raises(ZeroDivisionError), beside_copies(16.0, 1):
        _ = 1 / 0
    assert machine.events[-1] == "loaders beyond 0.0 closed"
    assert os.environ["PROTRAIN_CACHE"] == before


FOUND = SlowLink(wanted_gbps=16.0, loaders=1.8, alone_gbps=45.0, loaded_gbps=16.1, compute_share=0.99)
SAID = (
    "1.80 loaders a GPU leave copies 16.1 of 45.0 GB/s each way (16 wanted), and products of matrices 99% of their rate"
)


@contextmanager
def _beside(gbps: float | None, gpus: int, events: list[str]) -> Iterator[SlowLink | None]:
    events.append(f"load on {gpus}")
    yield FOUND if gbps == FOUND.wanted_gbps else None
    events.append("no load")


def test_every_contestant_and_the_calibration_run_beside_the_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["--link-rate", "16"])
    assert stop.value.code == 2
    assert "--link-rate needs a GPU" in capsys.readouterr().err
    events: list[str] = []

    def run(contestant: Contestant, *others: object, **options: object) -> Outcome:
        events.append(contestant.name)
        return Outcome(contestant=contestant, step_ms=(1.0,))

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, replaced in (
        ("beside_copies", lambda gbps, gpus: _beside(gbps, gpus, events)),
        ("calibrate_once", lambda gpus: events.append(f"calibrated {gpus}")),
        ("take_part", run),
        ("make_tokens", lambda *_: None),
    ):
        monkeypatch.setattr(f"bench.train.__main__.{name}", replaced)
    options = ["--model", "tiny", "--no-chunked-loss", "--batch", "2", "--sequence", "64", "--out", str(tmp_path)]
    assert main([*options, "--gpus", "2", "--contestants", "protrain,floor", "--link-rate", "16"]) == 0
    assert events == ["load on 2", "calibrated 2", "protrain", "floor", "no load"]
    comparison = Comparison.load(tmp_path / "compare-tiny-2x64-link-at-16-2gpus.json")
    assert comparison.task.link_gbps == 16.0
    assert comparison.slow_link == FOUND
    assert SAID in capsys.readouterr().out


def test_plans_are_measured_beside_the_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        planner.main(["--link-rate", "16"])
    assert stop.value.code == 2
    assert "--link-rate needs a GPU" in capsys.readouterr().err
    events: list[str] = []

    def run(command: list[str], gpus: int) -> int:
        events.append(f"measured on {gpus}")
        return 0

    properties = type("Properties", (), {"total_memory": 2**36})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    for name, replaced in (
        ("beside_copies", lambda gbps, gpus: _beside(gbps, gpus, events)),
        ("calibrate_once", lambda gpus: events.append(f"calibrated {gpus}")),
        ("device_name", lambda device: "a GPU"),
        ("run_ranks", run),
    ):
        monkeypatch.setattr(f"bench.planner.__main__.{name}", replaced)
    options = ["--gpus", "2", "--kind", "regret", "--only", "opt-13b", "--link-rate", "16", "--out", str(tmp_path)]
    assert planner.main(options) == 0
    assert events == ["load on 2", "calibrated 2", "measured on 2", "no load"]
    assert Results.load(tmp_path / "planner-regret-link-at-16-2gpus.json").slow_link == FOUND
    assert SAID in capsys.readouterr().out


@pytest.mark.parametrize("command", [main, planner.main])
def test_a_load_that_is_not_found_is_one_error(
    command: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise LoadError("--link-rate 60: the link has 48.0 GB/s")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: type("", (), {"total_memory": 2**36}))
    for module in ("train", "planner"):
        monkeypatch.setattr(f"bench.{module}.__main__.beside_copies", refuse)
    monkeypatch.setattr("bench.train.__main__.replace_loss", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        command(["--link-rate", "60"])
    assert stop.value.code == 2
    assert "--link-rate 60: the link has 48.0 GB/s" in capsys.readouterr().err


def test_tasks_recorded_before_there_was_a_load_on_the_link_have_none() -> None:
    task = Task(model="tiny", layers=2, batch=2, sequence=64, steps=4, warm_up=1)
    old = {name: value for name, value in task.to_dict().items() if name != "link_gbps"}
    assert Task.from_dict(old) == task
    assert task.link_gbps is None


@pytest.mark.gpu
def test_the_found_load_leaves_copies_about_the_wanted_rate() -> None:
    """The record of the load says so, and so do copies that this process makes beside the load."""
    size_bytes = 256 * 1024**2
    host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=True)
    far = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
    back, from_far = torch.ones_like(host, pin_memory=True), torch.ones_like(far)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()

    ways = list(zip(streams, (far, back), (host, from_far), strict=True))

    def gbps(used: Sequence[Any]) -> float:
        """The rate of the slower direction of ``used`` while all of them are in use."""
        begin, end = ([torch.cuda.Event(enable_timing=True) for _ in used] for _ in range(2))
        for index, (stream, target, source) in enumerate(used):
            with torch.cuda.stream(stream):
                begin[index].record()
                for _ in range(40):
                    target.copy_(source, non_blocking=True)
                end[index].record()
        torch.cuda.synchronize()
        return min(40 * size_bytes / one.elapsed_time(other) / 1e6 for one, other in zip(begin, end, strict=True))

    wanted = gbps(ways) / 3
    load = LinkLoad(gpus=1)
    try:
        found = load.leaving(wanted)
        assert found.loaded_gbps == pytest.approx(wanted, rel=0.15)
        with load.running(found.loaders):
            assert gbps(ways) == pytest.approx(wanted, rel=0.15)
            for way in ways:  # the other direction is in use by the load alone
                assert gbps([way]) == pytest.approx(wanted, rel=0.25)
        assert gbps(ways) > 2 * wanted
    finally:
        load.close()
    assert not multiprocessing.active_children()
