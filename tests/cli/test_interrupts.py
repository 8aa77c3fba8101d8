"""Ctrl-C ends every command soon, with one line and status 130, whatever is running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
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
def test_it_ends_the_imports(program: list[str], run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ended = run(*program, *PLAN, pressed="sys.meta_path.insert(0, PressAtImport('torch.nn'))")
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "protrain plan: interrupted\n", "")


def test_it_ends_the_exit_of_python(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ended = run(*PROTRAIN, "--version", pressed="atexit.register(press)")
    assert (ended.returncode, ended.stderr) == (130, "protrain: interrupted\n")


def test_where_it_is_ignored_it_stays_so(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    pressed = "sys.meta_path.insert(0, PressAtImport('protrain.cli.options'))"
    ended = run(*PROTRAIN, "--version", pressed=pressed, handler=signal.SIG_IGN)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_who_imports_the_library_keeps_the_handler_of_python(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = "import protrain, signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert run("-c", code, pressed="").stdout == "True\n"
