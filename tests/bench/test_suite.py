"""`protrain bench kernels` is `pytest bench/kernels`: checks without a GPU, files, statuses, refused comparisons."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.kernels.rows import OURS
from protrain.cli import bench
from protrain.cli.main import main
from tests.bench.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
ONE = ["-q", "-p", "no:cacheprovider", "-k", "test_unflatten and mistral"]
Starts = Callable[[int], list[list[str]]]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would time")


def _pytest(*options: str, folder: Path) -> tuple[int, str]:
    """The status of ``pytest bench/kernels``, and what it prints."""
    command = [sys.executable, "-m", "pytest", str(ROOT / "bench" / "kernels"), *options]
    with (folder / "printed.txt").open("w") as printed:
        status = Forked(command, stdout=printed, cwd=folder).wait()
    return status, (folder / "printed.txt").read_text()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """``starts(status)``: the commands that are started from now on, all of which end with ``status`` at once."""
    commands: list[list[str]] = []
    start = subprocess.Popen

    def ending_with(status: int) -> list[list[str]]:
        def start_another(command: list[str], **_: object) -> subprocess.Popen[bytes]:
            commands.append(command)
            return start([sys.executable, "-c", f"raise SystemExit({status})"])

        monkeypatch.setattr(subprocess, "Popen", start_another)
        return commands

    return ending_with


@pytest.mark.slow
@needs_no_gpu
def test_json_alone_is_on_standard_output(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "kernels", "--json", "--out", str(tmp_path), *ONE]) == 0
    captured = capfd.readouterr()
    rows = json.loads(captured.out)
    assert {row["verdict"] for row in rows} == {"bits equal"}
    assert OURS in {row["implementation"] for row in rows}
    assert json.loads((tmp_path / "kernels.json").read_text()) == rows
    assert (tmp_path / "kernels.csv").exists()
    assert "no CUDA device on this machine: correctness was checked, nothing was timed" in captured.err


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.xdist_group("ranks")
def test_quick_leaves_shapes_and_compilation_out(tmp_path: Path) -> None:
    status, printed = _pytest("-q", "--collect-only", "--quick", folder=tmp_path)
    assert status == 0
    tests = [line for line in printed.splitlines() if "::" in line]
    assert any("gpt2-10b" in line for line in tests)
    assert not any(word in line for line in tests for word in ("gpt2-20b", "mistral", "torch.compile"))


_LACKS_MEMORY = f"""
import sys, pytest, torch
from bench.kernels.tensors import Places
def lack(*arguments, **named):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
Places.of = lack
sys.exit(pytest.main([{str(ROOT / "bench" / "kernels")!r}, *{[*ONE, "-rs"]!r}]))
"""


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.xdist_group("ranks")
def test_rows_that_do_not_fit_are_left_out_and_said(tmp_path: Path) -> None:
    with (tmp_path / "printed.txt").open("w") as printed:
        status = Forked([sys.executable, "-c", _LACKS_MEMORY], stdout=printed, cwd=ROOT).wait()
    said = (tmp_path / "printed.txt").read_text()
    assert (status, "takes more memory than there is: CUDA out of memory. Tried to allocate 9.00 GiB" in said) == (
        0,
        True,
    )
    assert "skipped" in said
    assert "Traceback" not in said


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.xdist_group("ranks")
def test_figures_of_another_gpu_are_refused(tmp_path: Path) -> None:
    saved = {"machine_info": {"protrain": {"gpu": "Abacus 3000"}}, "benchmarks": [], "commit_info": {}, "version": "5"}
    (tmp_path / "0001_before.json").write_text(json.dumps(saved))
    status, printed = _pytest(*ONE, "--benchmark-compare", str(tmp_path / "0001_before.json"), folder=tmp_path)
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "the saved figures were taken on Abacus 3000, this machine has none" in printed


def test_help_shows_real_examples(capsys: pytest.CaptureFixture[str]) -> None:
    examples = {(): "kernels --quick", ("kernels",): "kernels --quick", ("planner",): "planner"}
    for words, example in examples.items():
        with pytest.raises(SystemExit) as stop:
            main(["bench", *words, "--help"])
        assert stop.value.code == 0
        assert f"  protrain bench {example} --out results\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_benchmark_that_is_a_module_runs_from_elsewhere(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "planner", "--part", "neither"])
    assert stop.value.code == 2
    assert "--part: invalid choice: 'neither'" in capfd.readouterr().err


def test_a_bad_option_of_pytest_is_the_users_to_mend(starts: Starts) -> None:
    commands = starts(pytest.ExitCode.USAGE_ERROR)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "kernels", "--no-such-option"])
    assert stop.value.code == 2
    assert commands[0][-1] == "--no-such-option"


@pytest.mark.parametrize("name", ["kernels", "planner", "train"])
def test_a_folder_of_results_that_is_a_file_is_refused_before_anything_runs(
    name: str, starts: Starts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = starts(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main(["bench", name, "--out", str(tmp_path / "file")])
    assert (stop.value.code, commands) == (2, [])
    assert f"--out: {tmp_path / 'file'} is a file: give a folder" in capsys.readouterr().err


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.xdist_group("ranks")
def test_pytest_refuses_such_a_folder_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, printed = _pytest(*ONE, "--out", str(tmp_path / "file"), folder=tmp_path)
    assert (status, "is a file: give a folder" in printed) == (pytest.ExitCode.USAGE_ERROR, True)


@pytest.mark.parametrize("module", ["planner", "train", "families"])
def test_no_benchmark_runs_for_results_that_cannot_be_written(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", [module, "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"bench.{module}", run_name="__main__")
    assert stop.value.code == 2
    assert "is a file: give a folder" in capsys.readouterr().err


def test_options_reach_the_benchmark_in_order(starts: Starts) -> None:
    commands = starts(1)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "kernels", "-k", "adam or pack", "--quick", "--benchmark-compare-fail=median:5%", "-x"])
    assert stop.value.code == 1
    folder = str(ROOT / "bench" / "kernels")
    options = ["-k", "adam or pack", "--quick", "--benchmark-compare-fail=median:5%", "-x"]
    assert [command[3:] for command in commands] == [["pytest", folder, *options]]


def test_without_a_checkout_it_says_where_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.protrain, "__file__", str(tmp_path / "site-packages" / "protrain" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "kernels"]) == 2
    assert "run this from a checkout of the repository" in capsys.readouterr().err
    monkeypatch.chdir(ROOT)
    assert bench.find_benchmark(bench.KERNELS) == ROOT / "bench" / "kernels"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "kernels"]) == 2
    error = capsys.readouterr().err
    assert "kernels needs pytest and pytest-benchmark: pip install 'protrain[bench]'" in error
