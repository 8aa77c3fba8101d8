"""Every kernel compiles for GPUs that aren't here, to the machine code that the numerics and the speed need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protrain_kernels.fold import MOST_RANKS
from tools.compile_kernels import TARGETS
from tools.kernel_variants import variants


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Compiling needs the real jit, which an interpreted test process doesn't have.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.slow
def test_the_fullest_variant_of_each_kernel_is_sound() -> None:
    """For AMD and for one of NVIDIA's targets, which take turns. ``make kernels`` compiles everything for every target.

    Rows are in the order of the list.
    """
    everything = [*variants()]
    names = [variant.name for variant in everything]
    assert len(set(names)) == len(names) > 40
    counting = [variant for variant in everything if "numel" in variant.integers]
    widths = {(variant.kernel, variant.integers["numel"] >= 1 << 31) for variant in counting}
    assert len(widths) == 2 * 2, "of each kernel that counts elements, up to 31 bits and beyond"
    ranks = {variant.constants["RANKS"] for variant in everything if "RANKS" in variant.constants}
    assert ranks == {*range(1, MOST_RANKS + 1)}
    fullest = {variant.kernel: variant.name for variant in everything}  # the last variant of each kernel
    assert len(fullest) == 6
    nvidia, (amd,) = ([name for name in TARGETS if name.startswith(kind)] for kind in ("sm_", "gfx"))
    chosen = {target: tuple([*fullest.values()][first :: len(nvidia)]) for first, target in enumerate(nvidia)}
    chosen[amd] = tuple(fullest.values())
    calls = [
        ["--target", target, "--jobs", "1", *(word for name in starts for word in ("--only", name))]
        for target, starts in chosen.items()
    ]
    script = f"from tools.compile_kernels import main\nraise SystemExit(sum(map(main, {calls})))"
    done = _python("-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if not line.startswith(("triton ", "kernel "))]
    expected = [(target, name) for target, starts in chosen.items() for name in names if name.startswith(starts)]
    for row, (target, name) in zip(rows, expected, strict=True):
        assert row.startswith(f"{name} ")
        assert f"  {target} " in row
        assert row.endswith("  ok")


@pytest.mark.slow
def test_defects_are_found() -> None:
    """A contracted Adam, and a wide load that isn't there, are told from sound code."""
    script = """
import dataclasses, triton
from tools.compile_kernels import TARGETS, defects
from tools.kernel_variants import variants
from tests.kernels.states import same_bits
variant = next(variants())
for target in ("sm_90", "gfx942"):
    source = variant.source(TARGETS[target].backend)
    fused = triton.compile(source, target=TARGETS[target], options={"num_warps": 4, "enable_fp_fusion": True})
    print(defects(variant, fused))
    print(defects(dataclasses.replace(variant, wide_loads=99), fused))
    print(defects(dataclasses.replace(variant, loads_together=99), fused))
    print(defects(dataclasses.replace(variant, same_bits=False), fused))
"""
    done = _python("-c", script)
    assert done.returncode == 0, done.stderr
    nvidia, wide, together, free, amd, *_, free_amd = done.stdout.splitlines()
    assert nvidia == "['fused multiply-add']"
    assert "loads of 16 bytes, not 99" in wide
    assert "loads in flight, not 99" in together
    assert amd == "['fused multiply-add allowed']"
    assert free == free_amd == "[]"  # of a kernel that promises no bits
