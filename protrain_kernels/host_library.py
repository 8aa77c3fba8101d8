"""Compiles the C of ``host/`` at first use and loads it with ctypes, whose calls release the GIL.

The library lies in ProTrain's cache under a hash of source, flags, compiler and CPU, so that a shared home serves
unlike machines. It is moved there atomically, so that many processes may build at the same time. Without a working
compiler separate torch operations do the work, slower but with the same bits.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

_FILES = sorted((Path(__file__).parent / "host").glob("*.[ch]"))
SOURCES = tuple(str(path) for path in _FILES if path.suffix == ".c")
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# Multiplies and adds are not contracted, because the Triton kernels and the reference round after every operation.
# Copies of a block stay loops. As calls of memmove, gcc's default, they run at half the speed where source and target
# are a multiple of 4 KiB apart, which chunks and gradients often are.
_LOOPS = "-fno-tree-loop-distribute-patterns"
FLAGS = ("-O3", _NATIVE, "-ffp-contract=off", "-fno-math-errno", _LOOPS, "-fopenmp", "-shared", "-fPIC")

_pointer, _length, _flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_ARGUMENTS = {
    "protrain_adam": (
        *(_pointer, _flag, _pointer, _pointer, _pointer, _flag),
        *(_pointer, _flag, _length, _pointer, _flag),
    ),
    "protrain_adam_out_of_place": (
        *(_pointer, _flag, _pointer, _pointer, _pointer, _flag),
        *(_pointer, _flag, _length, _pointer, _flag),
        *(_pointer, _pointer, _pointer, _pointer),
    ),
    "protrain_sum_of_squares": (_pointer, _flag, _length, _flag, _pointer, _flag),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled host kernels, or None where separate torch operations replace them, as a warning says once."""
    failures = []
    for compiler in _compilers():
        try:
            return open_library(build(compiler, FLAGS, _cache_folder()))
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{shlex.join(compiler)}: {_reason(error)}")
    found = "; ".join(failures) or "no C compiler found"
    warnings.warn(
        f"host kernels: {found}. Falling back to separate torch operations: same results, several times slower. "
        "Install gcc or clang with OpenMP, or name a compiler in CC",
        RuntimeWarning,
        stacklevel=5,
    )
    return None


def _cache_folder() -> Path:
    """The folder that ``protrain.common.cache`` names, by the same rule: this package imports nothing of protrain."""
    named = os.environ.get("PROTRAIN_CACHE", "")
    if named not in ("", "0", "1"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "protrain"


def _compilers() -> list[list[str]]:
    """Command prefixes to try in turn. Where ``$CC`` is set it is the only one."""
    if os.environ.get("CC"):
        return [shlex.split(os.environ["CC"])]
    return [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]


def build(compiler: list[str], flags: tuple[str, ...], folder: Path) -> Path:
    """Compile ``SOURCES`` into ``folder`` unless they are compiled there. OSError or SubprocessError when that fails.

    Where ``folder`` cannot be written, a folder for temporary files replaces it.
    """
    version = _run([*compiler, "--version"])
    identity = "\0".join(
        (*(path.read_text(encoding="utf-8") for path in _FILES), *compiler, *flags, version, _cpu_model())
    )
    name = f"host_kernels-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    try:
        if (folder / name).exists():
            return folder / name
        folder.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(suffix=".so", prefix=".building-", dir=folder)
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be written ({error.strerror or type(error).__name__}), so the host kernels are compiled "
            "again in every run: let PROTRAIN_CACHE name a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        # The name is not predictable, because others who write to that folder could plant a library there.
        folder = Path(tempfile.mkdtemp(prefix="protrain-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run([*compiler, *flags, *SOURCES, "-o", scratch, "-lm"])
        os.replace(scratch, folder / name)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return folder / name


def open_library(path: Path) -> ctypes.CDLL:
    """Load the library at ``path`` and declare its functions."""
    loaded = ctypes.CDLL(str(path))
    for name, types in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def _cpu_model() -> str:
    """What ``-march=native`` looks at: the model of the CPU and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)}))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        return lines[0] if lines else f"exit status {error.returncode}"
    return str(error)
