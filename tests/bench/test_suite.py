"""`protrain bench kernels` is `pytest bench/kernels`: checks without a GPU, files, statuses, refused comparisons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.kernels.rows import OURS
from protrain.cli import bench
from protrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
ONE = ["-q", "-p", "no:cacheprovider", "-k", "test_unflatten and mistral"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="would time")


def _pytest(*options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", str(ROOT / "bench" / "kernels"), *ONE, *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


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


@needs_no_gpu
def test_quick_leaves_shapes_and_compilation_out(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pytest", str(ROOT / "bench" / "kernels"), "-q", "--collect-only", "--quick"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert any("gpt2-10b" in line for line in tests)
    assert not any(word in line for line in tests for word in ("gpt2-20b", "mistral", "torch.compile"))


@needs_no_gpu
def test_figures_of_another_gpu_are_refused(tmp_path: Path) -> None:
    saved = {"machine_info": {"protrain": {"gpu": "Abacus 3000"}}, "benchmarks": [], "commit_info": {}, "version": "5"}
    (tmp_path / "0001_before.json").write_text(json.dumps(saved))
    done = _pytest("--benchmark-compare", str(tmp_path / "0001_before.json"), folder=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the saved figures were taken on Abacus 3000, this machine has none" in done.stderr


def test_help_shows_real_examples(capsys: pytest.CaptureFixture[str]) -> None:
    examples = {(): "kernels --quick", ("kernels",): "kernels --quick", ("planner",): "planner"}
    for words, example in examples.items():
        with pytest.raises(SystemExit) as stop:
            main(["bench", *words, "--help"])
        assert stop.value.code == 0
        assert f"  protrain bench {example} --out results\n" in capsys.readouterr().out


def test_a_benchmark_that_is_a_module_runs_from_elsewhere(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["bench", "planner", "--part", "neither"])
    assert stop.value.code == 2
    assert "--part: invalid choice: 'neither'" in capfd.readouterr().err


def test_a_bad_option_of_pytest_is_the_users_to_mend(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "kernels", "--no-such-option"])
    assert stop.value.code == 2
    assert "--no-such-option" in capfd.readouterr().err


def test_options_reach_the_benchmark_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    start = subprocess.Popen

    def start_another(command: list[str], **_: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        return start([sys.executable, "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(subprocess, "Popen", start_another)
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
