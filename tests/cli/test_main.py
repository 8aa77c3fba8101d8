"""The command line: help with an example, one line and status 2 for what the user can correct, and JSON on request."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import PContext

from protrain.cli.commands import COMMANDS
from protrain.cli.launch import start_ranks
from protrain.cli.main import main
from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"protrain {importlib.metadata.version('protrain')}\n", "")


@pytest.mark.parametrize("command", ["", "plan", "export", "convert", "calibrate", "bench"])
def test_a_help_text_fits_into_80_columns_and_shows_a_real_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert not command or f"  protrain {command} " in out


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


# -- where the output goes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_output_that_nobody_reads_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit, match="141"):
            main(["plan", "tiny", "--hardware", "rtx3090", "--batch", "2", "--sequence", "32", "--json"])
        pipe.flush()  # as Python does at its exit
    assert "Broken pipe" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_under_the_output_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "tiny", "--hardware", "rtx3090", "--seq=32", "--json"]) == 1
        full.flush()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "No space left" in line] == [
        "protrain plan: standard output: [Errno 28] No space left on device"
    ]


@pytest.mark.slow
def test_a_plan_needs_no_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it where the descriptor is closed
    out = tmp_path / "plan.json"
    argv = ["plan", "tiny", "--hardware", "rtx3090", "--batch", "2", "--sequence", "32", "--out", str(out)]
    assert main(argv) == 0
    assert Plan.load(out).tokens == 64


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
PROTRAIN = ["-m", "protrain"]
PLAN = ["plan", "tiny", "--hardware", "rtx3090"]

# `press` is called at the moment for Ctrl-C, which is always the same. Python runs this file before the program.
BEFORE = """
import atexit, os, signal, sys

def press():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):  # Python runs a handler between two of its instructions
        pass

class PressAtImport:
    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            sys.meta_path.remove(self)
            press()

"""


@pytest.fixture
def interrupted(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with ``words`` and Ctrl-C at the moment that ``pressed`` sets up."""

    def start(*words: str, pressed: str, handler: signal.Handlers = signal.SIG_DFL) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(BEFORE + pressed)
        return subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            preexec_fn=lambda: signal.signal(signal.SIGINT, handler),  # a shell may have set it to be ignored
        )

    return start


# The second is what the script does that pip makes of the entry point.
@pytest.mark.parametrize("program", [PROTRAIN, ["-c", "from protrain.cli.main import main; raise SystemExit(main())"]])
def test_it_ends_the_imports(program: list[str], interrupted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ended = interrupted(*program, *PLAN, pressed="sys.meta_path.insert(0, PressAtImport('torch.nn'))")
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "protrain plan: interrupted\n", "")


def test_it_ends_the_exit_of_python(interrupted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ended = interrupted(*PROTRAIN, "--version", pressed="atexit.register(press)")
    assert (ended.returncode, ended.stderr) == (130, "protrain: interrupted\n")


def test_where_it_is_ignored_it_stays_so(interrupted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    pressed = "sys.meta_path.insert(0, PressAtImport('protrain.cli.options'))"
    ended = interrupted(*PROTRAIN, "--version", pressed=pressed, handler=signal.SIG_IGN)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_who_imports_the_library_keeps_the_handler_of_python(
    interrupted: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = "import protrain, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert interrupted("-c", code, pressed="").stdout == "True\n"
