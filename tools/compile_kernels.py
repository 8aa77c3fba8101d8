"""Compile every Triton kernel ahead of time, for GPUs that this machine need not have, and inspect the code.

    python -m tools.compile_kernels                  every target, on all cores
    python -m tools.compile_kernels --target sm_90   one of them

The machine code must keep what the launchers rely on. For the numerics it holds no fused multiply-add, no flush of
subnormals and no approximate division, unless the kernel promises no bits, and no fp64; for the speed it has wide loads
and no spills. The tool prints a table, and its exit status is 1 when a variant fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import groupby
from multiprocessing import get_context
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from tools.kernel_variants import Variant, variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
STACK_BYTES = 16  # an address or two that is set aside before a loop costs nothing; values spilled in a loop take more
_ACCESS = re.compile(r"\b(ld|st)\.global\S*?(?:\.v(\d+))?\.[bfus](\d+)\b")
_FORBIDDEN_PTX = {
    "fused multiply-add": re.compile(r"\bfma\.\S*f32"),
    "subnormals flushed": re.compile(r"\.ftz\b"),
    "fp64": re.compile(r"\.f64\b"),
    "approximate root or division": re.compile(r"\b(?:sqrt|div|rcp|rsqrt)\.(?:approx|full)"),
    "local memory": re.compile(r"\.local\b"),
}
_FORBIDDEN_AMD = {
    "fused multiply-add": re.compile(r"\bv_(?:pk_)?(?:fma|fmac|mad|mac)_f32"),
    "subnormals flushed": re.compile(r"denorm_mode_32 [0-2]\b"),
    "fp64": re.compile(r"\bv_\w+_f64\b"),
    "local memory": re.compile(r"ScratchSize: [1-9]"),
}


_FORBIDDEN_LLIR = {
    "fused multiply-add asked for": re.compile(r"@llvm\.fma\."),
    "fused multiply-add allowed": re.compile(
        r"@llvm\.fmuladd\.|\bf(?:add|sub|mul|div|neg) (?:\w+ )*(?:contract|fast)\b"
    ),
    "inexact arithmetic allowed": re.compile(r"\bf(?:add|sub|mul|div|neg) (?:\w+ )*(?:reassoc|arcp|afn)\b"),
}


_OTHER_BITS = {  # that some of the defects lead to, and no other harm
    *("fused multiply-add", "fused multiply-add allowed", "fused multiply-add asked for"),
    *("subnormals flushed", "approximate root or division"),
}


def defects(variant: Variant, compiled: Any) -> list[str]:
    """The defects in the machine code of ``variant``. The list is empty if the code is sound."""
    found = _all_defects(variant, compiled)
    return found if variant.same_bits else [what for what in found if what not in _OTHER_BITS]


def _all_defects(variant: Variant, compiled: Any) -> list[str]:
    """The defects of a kernel that has to have the bits of its reference."""
    assembly = compiled.asm
    if "ptx" in assembly:
        code = assembly["ptx"]
        found = [what for what, pattern in _FORBIDDEN_PTX.items() if pattern.search(code)]
        wide = [what for what, lanes, bits in _ACCESS.findall(code) if int(lanes or 1) * int(bits) >= 128]
        if wide.count("ld") < variant.wide_loads:
            found.append(f"{wide.count('ld')} loads of 16 bytes, not {variant.wide_loads}")
        if wide.count("st") < variant.wide_stores:
            found.append(f"{wide.count('st')} stores of 16 bytes, not {variant.wide_stores}")
        together = max((len([*run]) for what, run in groupby(wide) if what == "ld"), default=0)
        if together < variant.loads_together:
            found.append(f"{together} loads in flight, not {variant.loads_together}")
        usage = _resource_usage(assembly["cubin"])
        if int(usage.get("LOCAL", "0")) or int(usage.get("STACK", "0")) > STACK_BYTES:
            found.append(f"spills: {usage}")
        return found
    # AMD's back end fuses only where the LLVM code that it gets from Triton fuses already (as roots do) or permits it,
    # so that code is inspected. The back end expands divisions later, and in the machine code such an expansion looks
    # like fused arithmetic.
    found = [what for what, pattern in _FORBIDDEN_AMD.items() if pattern.search(assembly["amdgcn"])]
    if variant.divides:
        found = [what for what in found if what != "fused multiply-add"]
    fused = [what for what, pattern in _FORBIDDEN_LLIR.items() if pattern.search(assembly["llir"])]
    if variant.divides == "root":
        fused = [what for what in fused if what != "fused multiply-add asked for"]
    if compiled.metadata.enable_fp_fusion:
        fused.append("fused multiply-add allowed")
    return found + fused


def _resource_usage(cubin: bytes) -> dict[str, str]:
    """How much of REG, STACK, LOCAL and SHARED the assembler spent on the kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # The line of the whole program comes before the kernel's line, so the last value of each counts.
    return dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text))


def compile_all(targets: Iterable[str], *, only: Sequence[str] = ("",), jobs: int = 1) -> bool:
    """Compile and inspect variants, printing a row for each. Returns whether all are sound.

    Args:
        targets: names out of ``TARGETS``.
        only: what the name of a variant must start with; one of these is enough.
        jobs: how many processes compile at the same time.
    """
    sound = True
    names = [variant.name for variant in variants()]
    chosen = [number for number, name in enumerate(names) if name.startswith(tuple(only))]
    width = max(len(names[number]) for number in chosen)
    tasks = [(target, number) for target in targets for number in chosen]
    print(f"triton {triton.__version__}")
    print(f"{'kernel':<{width}}  target  seconds  verdict")
    # Processes are spawned, not forked, because torch and LLVM have threads by now.
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        verdicts = pool.map(_inspected, tasks) if pool else map(_inspected, tasks)
        for (target, number), (found, seconds) in zip(tasks, verdicts, strict=True):
            print(f"{names[number]:<{width}}  {target:<6}  {seconds:7.2f}  {'; '.join(found) or 'ok'}", flush=True)
            sound = sound and not found
    return sound


def _inspected(task: tuple[str, int]) -> tuple[list[str], float]:
    """The defects of the variant with this number for this target, and the seconds that it took to compile."""
    target, number = task
    variant = [*variants()][number]
    start = time.perf_counter()
    try:
        source = variant.source(TARGETS[target].backend)
        found = defects(variant, triton.compile(source, target=TARGETS[target], options=variant.options))
    except Exception as error:  # the verdict of this row, whatever the compiler raises; the next row still runs
        found = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return found, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.compile_kernels",
        description="Compile and inspect every Triton kernel, without a GPU.",
        epilog="example: python -m tools.compile_kernels --target sm_90 --only adam",
    )
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="one target; may be repeated")
    parser.add_argument(
        "--only", action="append", metavar="PREFIX", help="only variants whose name starts so; may be repeated"
    )
    parser.add_argument("--jobs", type=_jobs, default=os.cpu_count() or 1, help="processes (one a core)")
    options = parser.parse_args(arguments)
    names = [variant.name for variant in variants()]
    for prefix in options.only or ():
        if not any(name.startswith(prefix) for name in names):
            parser.error(f"no variant starts with {prefix!r}")
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and the interpreter has no machine code: unset it")
    targets = options.target or TARGETS
    return 0 if compile_all(targets, only=options.only or [""], jobs=options.jobs) else 1


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
