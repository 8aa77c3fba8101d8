"""Processes that have imported everything when they start, as a template imports it once and they are forked from it.

To import torch, transformers and protrain takes seconds, and to fork a process milliseconds. A process runs one
function and ends as a script ends: an exception reaches ``sys.excepthook``, threads are waited for, and functions of
``atexit`` are called. Then it exits. Python would free all modules first, which takes twenty times as long as the rest
of an empty process, so only a test of that asks for it. This file is also the script that the template runs.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.opt.modeling_opt",
    "protrain.cli.main",
    "tests.engine.harness",
)


class Process:
    """A process that runs ``function(*args)``. Both must be picklable.

    Args:
        environment: what to change in that of the template.
        printed: the file to print to. None: where the tests print.
        frees_modules: whether Python frees all modules in the end.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *args: Any,
        environment: Mapping[str, str],
        printed: Path | None = None,
        frees_modules: bool = False,
    ) -> None:
        self.pid: int = _ask("fork", function, args, dict(environment), printed, frees_modules)

    @property
    def status(self) -> int | None:
        """The exit status; negative: the signal that killed the process; None: it runs."""
        status: int | None = _ask("status", self.pid)
        return status

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Nothing happens if the process has ended."""
        if self.status is None:
            os.kill(self.pid, number)


def import_early(names: frozenset[str]) -> bool:
    """Let the template import these modules, for all later processes. Returns whether it had not, and could."""
    imported: bool = _ask("import", names)
    return imported


_lock = threading.Lock()


def _ask(*request: Any) -> Any:
    """What the template answers. Any thread may ask."""
    with _lock:
        template = _template()
        assert template.stdin is not None
        assert template.stdout is not None
        pickle.dump(request, template.stdin)
        template.stdin.flush()
        return pickle.load(template.stdout)


@cache
def _template() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.warm"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(process.kill)
    return process


_exit_status: int | None = None  # with which the process exits before Python frees its modules; None: it does not


def _exit() -> None:
    """Exit, if the status is known."""
    if _exit_status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status)


def _run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Call ``function``, and know the exit status that follows from how it ends."""
    global _exit_status
    try:
        function(*args)
        _exit_status = 0
    except SystemExit as end:
        _exit_status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        _exit_status = 1
        raise


def _imports(name: str) -> bool:
    """Import a module. Returns False if it was imported before, or is not installed."""
    if name in sys.modules:
        return False
    try:
        with _without_gpus():
            importlib.import_module(name)
    except ImportError:
        return False
    gc.collect()
    gc.freeze()  # a collection in a process would copy the pages of all that was imported
    return True


@contextmanager
def _without_gpus() -> Iterator[None]:
    """Hide the GPUs from what is imported.

    A package that asks for properties of GPUs when it is imported, as bitsandbytes does, starts CUDA. Processes that
    are forked afterwards could not use CUDA. Inside, torch counts GPUs by NVML, because its usual way starts CUDA.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        yield


def _serve() -> None:
    """Answer requests as the template. In each process that it forks, this runs what is asked for."""
    atexit.register(_exit)  # before the imports, so that it is called after all that they register
    for name in IMPORTED:
        _imports(name)
    statuses: dict[int, int] = {}
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any
        match request:
            case "import", names:
                answer = True in list(map(_imports, names))
            case "status", pid:
                if pid not in statuses:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        statuses[pid] = os.waitstatus_to_exitcode(status)
                answer = statuses.get(pid)
            case "fork", function, args, environment, printed, frees_modules:
                answer = os.fork()
                statuses.pop(answer, None)  # of an earlier process with the same number
                if not answer:
                    os.environ.update(environment)
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    if printed is not None:
                        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 2)
                    os.dup2(2, 1)
                    if frees_modules:
                        function(*args)
                    else:
                        _run(function, args)
                    return
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
