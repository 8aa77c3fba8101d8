"""Compiles the Triton kernels' variants ahead of time, for GPUs that this machine need not have, and inspects the code.

    python -m protrain_kernels.compile                  every target, on all cores
    python -m protrain_kernels.compile --target sm_90   one of them
    python -m protrain_kernels.compile --every          every combination of a launch's choices, in minutes a target

What the launchers rely on is checked in the machine code: no fused multiply-add, no flush of subnormals, no
approximate division and no fp64 (the numerics), wide loads and no spills (the speed). Prints a table; the exit
status is 1 when a variant fails.
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
from itertools import groupby, islice
from multiprocessing import get_context
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from protrain_kernels.variants import Variant, variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
STACK_BYTES = 16  # an address or two set aside before a loop costs nothing; values spilled within one take more
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


def defects(variant: Variant, compiled: Any) -> list[str]:
    """What is wrong with the machine code of ``variant``; nothing is the good answer."""
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
    # Nothing may be fused in what Triton hands to AMD's back end, which fuses on permission alone: neither by its own
    # hand, roots aside, nor by such a permission. Its expansions of division come after that, and can't be told from
    # fused arithmetic in the machine code.
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
    """What the assembler spent on the kernel: REG, STACK, LOCAL, SHARED."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # The program's own line comes before the kernel's: the last value of each counts.
    return dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text))


def compile_all(targets: Iterable[str], *, only: Sequence[str] = ("",), every: bool = False, jobs: int = 1) -> bool:
    """Compile and inspect the variants that ``only`` names, printing a row each. Whether all are sound.

    Args:
        targets: Names out of :data:`TARGETS`.
        only: What a variant's name may start with.
        every: Every combination of a launch's choices.
        jobs: Processes beside each other.
    """
    sound = True
    chosen = [number for number, variant in enumerate(variants(every=every)) if variant.name.startswith(tuple(only))]
    names = [variant.name for variant in variants(every=every)]
    width = max(len(names[number]) for number in chosen)
    tasks = [(target, number, every) for target in targets for number in chosen]
    print(f"triton {triton.__version__}")
    print(f"{'kernel':<{width}}  target  seconds  verdict")
    # Started anew, not forked: torch and LLVM have threads by now.
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        verdicts = pool.map(_inspected, tasks) if pool else map(_inspected, tasks)
        for (target, number, _), (found, seconds) in zip(tasks, verdicts, strict=True):
            print(f"{names[number]:<{width}}  {target:<6}  {seconds:7.2f}  {'; '.join(found) or 'ok'}", flush=True)
            sound = sound and not found
    return sound


def _inspected(task: tuple[str, int, bool]) -> tuple[list[str], float]:
    """The defects of a target's variant, by its number, and the seconds that it took."""
    target, number, every = task
    variant = next(islice(variants(every=every), number, None))
    start = time.perf_counter()
    try:
        source = variant.source(TARGETS[target].backend)
        found = defects(variant, triton.compile(source, target=TARGETS[target], options=variant.options))
    except Exception as error:  # whatever a compiler raises is this row's verdict, and the next row still runs
        found = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return found, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m protrain_kernels.compile",
        description="Compile and inspect every Triton kernel, without a GPU.",
        epilog="example: python -m protrain_kernels.compile --target sm_90 --only adam",
    )
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="one target; may be repeated")
    parser.add_argument(
        "--only", action="append", metavar="PREFIX", help="only variants whose name starts so; may be repeated"
    )
    parser.add_argument("--every", action="store_true", help="every combination, not a choice: minutes a target")
    parser.add_argument("--jobs", type=_jobs, default=os.cpu_count() or 1, help="processes (one a core)")
    options = parser.parse_args(arguments)
    names = [variant.name for variant in variants(every=options.every)]
    for prefix in options.only or ():
        if not any(name.startswith(prefix) for name in names):
            parser.error(f"no variant starts with {prefix!r}")
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and the interpreter has no machine code: unset it")
    targets = options.target or TARGETS
    return 0 if compile_all(targets, only=options.only or [""], every=options.every, jobs=options.jobs) else 1


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
