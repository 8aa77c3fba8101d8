"""The command line: help with an example, one line and status 2 for what the user can correct, and JSON on request."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import PContext

from protrain.cli.commands import COMMANDS
from protrain.cli.launch import start_ranks
from protrain.cli.main import main
from protrain.common.cache import say_unwritable
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"protrain {importlib.metadata.version('protrain')}\n", "")


def test_the_package_runs_as_a_program() -> None:
    refused = subprocess.run([sys.executable, "-m", "protrain", "nothing"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("protrain: error: ")


@pytest.mark.parametrize("command", ["plan", "calibrate"])
def test_help_shows_a_real_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "example" in out
    assert f"  protrain {command} " in out


@pytest.mark.parametrize("command", ["", "plan", "export", "convert", "calibrate", "bench"])
def test_a_help_text_fits_into_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0
    assert [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS if command != "train")]
)
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    code = (
        f"import sys, protrain.cli.main as command\ntry:\n  command.main({words})\n"
        "finally:\n  print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["plan", "tiny", "--acumulation=2"], "unrecognized arguments: --acumulation=2"),
        (["plan", "tiny", "--batch", "0"], "--batch: must be between 1 and 65536, not 0"),
        (["plan", "tiny", "--batch", "x"], "--batch: invalid int value: 'x'"),
        (["plan", "tiny", "--hardware", "h100", "--device-memory", "lots"], "device_memory must be a number of bytes"),
        (["plan", "tiny", "--dtype", "int8"], "invalid choice: 'int8'"),
        (
            ["plan", "tinny", "--hardware", "h100"],
            "there is no model 'tinny': give a folder with config.json, or one of",
        ),
        (
            ["plan", "tiny", "--hardware", "config.json"],
            "config.json is not a hardware profile of this version of ProTrain: ",
        ),
        (["plan", "tiny", "--hardware", "no-such-card"], "no-such-card"),
        (["plan", "tiny", "--hardware", "h100", "--device", "cpu"], "--device names a device of this machine: leave"),
        (["calibrate", "--device", "cpu", "--out", "folder"], "--out: folder is no regular file"),
        (
            ["export", "folder", "out", "--model", "tiny"],
            "folder holds no checkpoint; give the folder that save_checkpoint wrote to",
        ),
    ],
)
def test_a_bad_argument_is_named_with_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # stands for a GPU where the loss is chosen
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, ""), err
    said = err.splitlines()[-1]
    assert said.startswith("protrain")
    assert message in said


def test_a_torch_that_cannot_be_imported_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "protrain.cli.runs", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    status, out, err = run(capsys, "calibrate", "--device", "cpu")
    assert (status, out) == (2, "")
    assert err == "protrain calibrate: import of torch halted; None in sys.modules\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("argv", [["calibrate"], ["plan", "tiny"]])
def test_a_missing_gpu_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, *argv)
    assert (status, len(err.splitlines())) == (2, 1)
    assert "this machine has no GPU" in err
    assert "give --device cpu for a simulated device" in err
    status, _, err = run(capsys, *argv, "--device", "cuda")
    assert status == 2
    assert "but there is no CUDA GPU here" in err


def test_several_processes_need_a_launcher_that_says_where_they_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = run(capsys, "calibrate", "--device", "cpu")
    assert status == 2
    assert "WORLD_SIZE announces 2 processes and MASTER_ADDR is missing" in err
    status, _, err = run(capsys, "calibrate", "--device", "cpu", "--gpus", "3")
    assert status == 2
    assert err == "protrain calibrate: --gpus 3: 2 processes were started, each for one GPU; leave --gpus out\n"


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    say_unwritable.cache_clear()
    status, _, err = run(capsys, "calibrate", "--device", "cpu", "--seconds", "0.02", "--json")
    assert status == 0, err
    lines = [line for line in err.splitlines() if "(Not a directory), so everything is measured again" in line]
    assert len(lines) == 1, err
    assert lines[0].startswith(f"RuntimeWarning: {tmp_path}/file/cache cannot be written")
    assert "let PROTRAIN_CACHE name a folder that can be" in lines[0]


@pytest.mark.slow
def test_a_plan_is_printed_as_a_table_or_json_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tiny", "--device", "cpu", "--batch", "2", "--sequence", "32"]
    status, table, err = run(capsys, *argv)
    assert status == 0, err
    assert "n_persist" in table
    status, text, _ = run(capsys, *argv, "--json", "--out", str(tmp_path / "new" / "plan.json"))
    assert status == 0
    plan = json.loads(text)["plan"]
    assert plan["n_persist"] <= plan["n_chunks"]
    assert json.loads((tmp_path / "new" / "plan.json").read_text()) == plan


def test_an_impossible_machine_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(load("h100").to_dict() | {"h2d_gbps": 0}))
    status, out, err = run(capsys, "plan", "tiny", "--hardware", str(path))
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert f"{path} is not a hardware profile" in err
    assert "h2d_gbps must be a finite number above 0, not 0.0" in err


def test_a_gpu_too_full_to_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")

    monkeypatch.setattr("protrain.calibrate", fail)
    assert main(["calibrate", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "protrain calibrate: close what else uses the GPU, as nvidia-smi or rocm-smi lists it: CUDA out of memory. "
        "Tried to allocate 32.00 MiB."
    )


@pytest.mark.slow
def test_calibrate_measures_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.json"
    status, text, err = run(capsys, "calibrate", "--device", "cpu", "--seconds", "0.05", "--json", "--out", str(out))
    assert status == 0, err
    hardware = HardwareProfile.load(out)
    assert HardwareProfile.from_json(text) == hardware
    assert (hardware.device_type, hardware.source) == ("cpu", "measured")
    status, text, err = run(
        capsys, "plan", "tiny", "--hardware", str(out), "--batch", "1", "--sequence", "16", "--json"
    )
    assert status == 0, err
    assert json.loads(text)["plan"]["tokens"] == 16


def test_gpus_is_torchrun_that_waits_for_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[argparse.Namespace] = []
    monkeypatch.setattr("torch.distributed.run.run", started.append)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    words = ["calibrate", "--gpus", "2", "--device", "cpu"]
    with pytest.raises(SystemExit, match="0"):
        start_ranks(2, words)
    assert (started[0].nproc_per_node, started[0].training_script) == ("2", "protrain")
    assert started[0].training_script_args == words
    assert int(os.environ.pop("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")) >= 600
    assert inspect.signature(PContext.close).parameters["timeout"].default >= 600
