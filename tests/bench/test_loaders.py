"""Loaders work only while they are told to, probes answer, and neither outlives the process that started it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.dram_load import DramLoad
from bench.loaders import LoadError, Loaders, Probes, enough_loaders, rest_s

_STARTED = """
import functools, sys, time
from pathlib import Path
from bench.loaders import Loaders, Probes
if __name__ == "__main__":
    probes = Probes(functools.partial, [(float, "1.5")])
    loaders = Loaders(functools.partial, 1, each=[(Path.touch, Path(sys.argv[1]))])
    with loaders.running(1.0):
        print("running", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(("wanted", "loaders"), [(0.7, 2.4), (0.5, 4.0), (0.1, 7.2)])
def test_the_load_is_as_heavy_as_wanted(wanted: float, loaders: float) -> None:
    assert enough_loaders(lambda n: 1.0 - n / 8, wanted, most=8) == pytest.approx(loaders, abs=0.07)


def test_a_loader_rests_in_proportion_to_its_work() -> None:
    assert rest_s(0.03, 0.25) == pytest.approx(0.09)  # 30 of 120 ms
    assert rest_s(0.03, 1.0) == 0.0


def _is_touched(path: Path) -> bool:
    """Whether a loader touches ``path`` now, and does so again."""
    path.unlink(missing_ok=True)
    until = time.monotonic() + 0.5
    while time.monotonic() < until and not path.exists():
        time.sleep(0.01)
    return path.exists()


def test_loaders_work_while_they_run_in_every_place_and_only_then(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    loaders = Loaders(functools.partial, 2, each=[(Path.touch, one), (Path.touch, other)])
    try:
        assert not _is_touched(one)
        for count in (1.0, 0.5, 2.0):
            with loaders.running(count):
                assert _is_touched(one)
                assert _is_touched(other)
            assert not _is_touched(one)
        assert len(multiprocessing.active_children()) == 4
        loaders.close(beyond=0.3)
        assert len(multiprocessing.active_children()) == 2
        with loaders.running(0.3):
            assert _is_touched(other)
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        with pytest.raises(LoadError, match="ended with exit status -9"), loaders.running(1.0):
            pass
    finally:
        loaders.close()
    assert not multiprocessing.active_children()


def test_what_fails_at_its_start_is_one_error_and_leaves_no_process() -> None:
    with pytest.raises(LoadError, match="a process that makes a load ended with exit status 1"):
        Loaders(functools.partial, 2, each=[("nothing to call",)])
    with pytest.raises(LoadError, match="a process that measures what a load leaves ended"):
        Probes(functools.partial, [("nothing to call",)])
    assert not multiprocessing.active_children()


def test_probes_answer_again_and_again() -> None:
    probes = Probes(functools.partial, [(float, "1.5"), (float, "2.5")])
    try:
        assert probes.measure() == probes.measure() == [1.5, 2.5]
        child = multiprocessing.active_children()[0]
        child.kill()
        child.join()
        with pytest.raises(LoadError, match="a process that measures what a load leaves ended"):
            probes.measure()
    finally:
        probes.close()
    assert not multiprocessing.active_children()


def test_loaders_and_probes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script, touched = tmp_path / "started.py", tmp_path / "touched"
    script.write_text(_STARTED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, str(script), str(touched)], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"running\n"
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(children) == 3, "a loader, a probe, and the tracker of what they share"
    assert _is_touched(touched)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 30
    while any(_lives(int(child)) for child in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_lives(int(child)) for child in children)


def _lives(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_load_on_the_host_s_dram_is_found_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.dram_load.MIB", 2**14)
    monkeypatch.setattr("bench.dram_load._MEASURED_S", 0.05)
    monkeypatch.setattr("bench.dram_load._MOST_LOADERS", 2)
    load = DramLoad(threads=1)
    try:
        found = load.leaving(0.7, loaders=1.5)
        assert found.loaders == 1.5
        assert min(found.alone_gparams, found.loaded_gparams) > 0
    finally:
        load.close()
    assert not multiprocessing.active_children()
