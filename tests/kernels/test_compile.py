"""Every kernel compiles for GPUs that aren't here, to the machine code that the numerics and the speed need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protrain_kernels.variants import variants


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Compiling needs the real jit, which an interpreted test process doesn't have.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
def test_every_variant_is_sound(target: str) -> None:
    done = _python("-m", "protrain_kernels.compile", "--target", target)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [variant.name for variant in variants()]
    assert len(set(names)) == len(names) > 40
    for name in names:
        assert any(line.startswith(f"{name} ") and line.endswith("  ok") for line in done.stdout.splitlines()), name


def test_defects_are_found() -> None:
    """A contracted Adam, and a wide load that isn't there, are told from sound code."""
    script = """
import dataclasses, triton
from protrain_kernels.compile import TARGETS, defects
from protrain_kernels.variants import variants
variant = next(variants())
for target in ("sm_90", "gfx942"):
    source = variant.source(TARGETS[target].backend)
    fused = triton.compile(source, target=TARGETS[target], options={"num_warps": 4, "enable_fp_fusion": True})
    print(defects(variant, fused))
    print(defects(dataclasses.replace(variant, wide_loads=99), fused))
    print(defects(dataclasses.replace(variant, loads_together=99), fused))
"""
    done = _python("-c", script)
    assert done.returncode == 0, done.stderr
    nvidia, wide, together, amd, *_ = done.stdout.splitlines()
    assert nvidia == "['fused multiply-add']"
    assert "loads of 16 bytes, not 99" in wide
    assert "loads in flight, not 99" in together
    assert amd == "['fused multiply-add allowed']"


def test_launches_find_their_variants_among_the_compiled() -> None:
    """What real calls specialise on is in the list of what is compiled for every GPU."""
    done = _python(str(Path(__file__).with_name("record_launches.py")))
    assert done.returncode == 0, done.stderr
    kernels = "adam flatten join pack split streamed_adam sum_of_squares unflatten unpack"
    assert done.stdout.splitlines() == ["launched: " + " ".join(f"{name}_kernel" for name in kernels.split())]


def test_a_bad_argument_is_one_clear_line() -> None:
    done = _python("-m", "protrain_kernels.compile", "--only", "nothing")
    assert done.returncode == 2
    assert "no variant starts with 'nothing'" in done.stderr
