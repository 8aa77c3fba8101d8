"""Compiles every Triton kernel variant ahead of time, for GPUs that this machine need not have, and inspects the code.

    python -m protrain_kernels.compile                  every target
    python -m protrain_kernels.compile --target sm_90   one of them

What the launchers rely on is checked in the machine code: no fused multiply-add, no flush of subnormals, no
approximate division and no fp64 (the numerics), wide loads and no spills (the speed). Prints a table; the exit
status is 1 when a variant fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from protrain_kernels.adam import BLOCK, AdamScalars, adam_kernel
from protrain_kernels.checks import (
    LAUNCH_OPTIONS,
    TILE_GROUP,
    TILE_LANES,
    TILE_OPTIONS,
    TILE_ROWS,
    TILE_UNROLL,
)
from protrain_kernels.flatten_kernels import BF16, FP16, FP32, MIXED, flatten_kernel, unflatten_kernel
from protrain_kernels.pack import PACK_OPTIONS, PACK_STEPS
from protrain_kernels.pack_kernels import pack_kernel, unpack_kernel
from protrain_kernels.pack_layout import BITS, FP8, GATHER, MASK, RAW, TILE
from protrain_kernels.split_master import BLOCK as SPLIT_BLOCK
from protrain_kernels.split_master import join_kernel, split_kernel
from protrain_kernels.streamed_adam import streamed_adam_kernel
from protrain_kernels.sum_of_squares import sum_of_squares_kernel

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


@dataclasses.dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: what a launch with these types, aligned as the engine aligns them, compiles."""

    name: str
    kernel: Any
    pointers: dict[str, str]  # argument -> element type
    lengths: dict[str, bool]  # integer argument -> whether it is a multiple of 16
    constants: dict[str, Any]
    floats: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()  # pointers that aren't multiples of 16 bytes
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: LAUNCH_OPTIONS)
    wide_loads: int = 0  # at least so many loads of 16 bytes
    wide_stores: int = 0  # at least so many stores of 16 bytes
    # AMD's correctly rounded division and root, and 64-bit integer division, are made of fused multiply-adds.
    divides: bool = False

    def source(self) -> ASTSource:
        """What ``triton.compile`` takes."""
        names = list(self.kernel.arg_names)
        signature = {name: f"*{kind.replace('bf16', 'i16')}" for name, kind in self.pointers.items()}  # see as_bits
        signature |= dict.fromkeys(self.lengths, "i32") | dict.fromkeys(self.floats, "fp32")
        signature |= dict.fromkeys(self.constants, "constexpr")
        aligned = [name for name in self.pointers if name not in self.unaligned]
        aligned += [name for name, multiple in self.lengths.items() if multiple]
        return ASTSource(
            self.kernel,
            {name: signature[name] for name in names},
            constexprs=self.constants,
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )


def variants() -> Iterator[Variant]:
    """Every variant that the launchers use; of those that combine freely, each part at least once."""
    yield from _adam_variants()
    yield from _sum_variants()
    yield from _flatten_variants()
    yield from _split_variants()
    yield from _pack_variants()


def _adam_variants() -> Iterator[Variant]:
    scalars = tuple(field.name for field in dataclasses.fields(AdamScalars))
    for weight, master, grads in (
        ("bf16", "i16", ("bf16", "fp32")),
        ("fp16", "fp32", ("fp16", "fp32")),
        ("fp32", "fp32", ("fp32",)),
    ):
        for grad, (scale, skip), l2 in product(grads, ((False, False), (True, False), (True, True)), (False, True)):
            shared: dict[str, Any] = {
                "pointers": {
                    "weight": weight,
                    "master": master,
                    "exp_avg": "fp32",
                    "exp_avg_sq": "fp32",
                    "grad": grad,
                    "scale": "fp32",
                    "skip": "i32",
                },
                "lengths": {"numel": True},
                "floats": scalars,
                "constants": {
                    "SPLIT": weight == "bf16",
                    "OWN_MASTER": weight == "fp32",
                    "HAS_SCALE": scale,
                    "HAS_SKIP": skip,
                    "HAS_L2": l2,
                    "BLOCK": BLOCK,
                },
                "wide_loads": 5 if weight == "bf16" else 4,
                "wide_stores": 4 if weight == "bf16" else 3,
                "divides": True,
            }
            what = f"{weight}, {grad} gradient{', scale' * scale}{', skip' * skip}{', l2' * l2}"
            yield Variant(name=f"adam {what}", kernel=adam_kernel, **shared)
            if scale == skip and not l2:
                yield Variant(name=f"streamed adam {what}", kernel=streamed_adam_kernel, **shared)


_TILES = {"GROUP": TILE_GROUP, "ROWS": TILE_ROWS, "LANES": TILE_LANES, "UNROLL": TILE_UNROLL}
_CODES = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "mixed": MIXED}


def _sum_variants() -> Iterator[Variant]:
    for kind in ("bf16", "fp16", "fp32"):
        yield Variant(
            name=f"sum_of_squares {kind}",
            kernel=sum_of_squares_kernel,
            pointers={"values": kind, "partials": "fp32"},
            lengths={"numel": False},
            constants=_TILES,
            options=TILE_OPTIONS,
            wide_loads=TILE_UNROLL,
        )


def _flatten_variants() -> Iterator[Variant]:
    tables = {"tensor_of": "i32", "rows": "i64", "addresses": "i64"}
    plain = {"DIMS": 0, "WIDE": False}
    for kind, chunk in product(_CODES, ("bf16", "fp16", "fp32")):
        shared: dict[str, Any] = {
            "lengths": {"slot": True},
            "options": TILE_OPTIONS,
            "wide_loads": TILE_UNROLL * (3 if kind == "mixed" else 1),
            "wide_stores": TILE_UNROLL * (3 if kind == "mixed" else 1),
        }
        mixed, same = kind == "mixed", kind == chunk
        for wanted, what, choices in (
            (not mixed, "", plain),
            (same or chunk == "fp32", ", scale, finite", {**plain, "HAS_SCALE": True, "FINITE": True}),
            (same, ", no squares", {**plain, "SQUARES": False}),
            (chunk == "fp32", ", accumulate, finite", {**plain, "ACCUMULATE": True, "FINITE": True}),
            (same or (mixed and chunk == "fp32"), ", strided", {"DIMS": 4, "WIDE": chunk == "fp32"}),
        ):
            if not wanted:
                continue
            constants = {"ACCUMULATE": False, "HAS_SCALE": False, "SQUARES": True, "FINITE": False, **choices}
            yield Variant(
                divides=bool(constants["WIDE"]),
                name=f"flatten {kind} into {chunk}{what}",
                kernel=flatten_kernel,
                pointers={**tables, "chunk": chunk, "partials": "fp32", "scale": "fp32", "nonfinite": "i32"},
                constants={"TYPE": _CODES[kind], **constants, **_TILES},
                **shared,
            )
        for scale, dims in ((False, 0), (True, 4)):
            if (mixed and chunk != "bf16") or (scale and not same and not mixed):
                continue
            yield Variant(
                name=f"unflatten {chunk} into {kind}{', scale' * scale}{', strided' * (dims > 0)}",
                kernel=unflatten_kernel,
                pointers={**tables, "chunk": chunk, "scale": "fp32"},
                constants={"TYPE": _CODES[kind], "DIMS": dims, "WIDE": False, "HAS_SCALE": scale, **_TILES},
                **shared,
            )


def _split_variants() -> Iterator[Variant]:
    split = {"master": "fp32", "weight": "bf16", "remainder": "i16"}
    for name, kernel in (("split", split_kernel), ("join", join_kernel)):
        yield Variant(
            name=name,
            kernel=kernel,
            pointers=split,
            lengths={"numel": True},
            constants={"BLOCK": SPLIT_BLOCK},
            wide_loads=2,
            wide_stores=2,
        )


def _pack_variants() -> Iterator[Variant]:
    bits = {"raw": 1 << RAW, "gather": 1 << GATHER, "bits": 1 << BITS, "mask": 1 << MASK, "fp8": 1 << FP8}
    for name, kernel in (("pack", pack_kernel), ("unpack", unpack_kernel)):
        for kinds, widths, types, dims, loads, stores in (
            (("raw",), 0, 0, 0, 1, 1),
            (("bits",), 0, 0, 0, name == "pack", name == "unpack"),
            (("mask",), 0, 7, 0, 3 * (name == "pack"), 3 * (name == "unpack")),
            (("fp8",), 0, 7, 0, 3 * (name == "pack"), 3 * (name == "unpack")),
            (("raw", "gather", "bits"), 15, 0, 4, 1 + (name == "pack"), 1 + (name == "unpack")),
            (tuple(bits), 15, 7, 8, 1, 1),
        ):
            yield Variant(
                name=f"{name} {', '.join(kinds)}{', strided' * (dims > 0)}",
                kernel=kernel,
                pointers={"piece_of": "i32", "rows": "i64", "addresses": "i64", "packed": "u8"},
                lengths={"slot": True},
                constants={
                    "KINDS": sum(bits[kind] for kind in kinds),
                    "WIDTHS": widths,
                    "TYPES": types,
                    "DIMS": dims,
                    "WIDE": dims > 4,
                    "TILE": TILE,
                    "STEPS": PACK_STEPS,
                },
                options=PACK_OPTIONS,
                divides=dims > 4,
                wide_loads=loads,
                wide_stores=stores,
            )


def defects(variant: Variant, assembly: dict[str, Any]) -> list[str]:
    """What is wrong with the machine code of ``variant``; nothing is the good answer."""
    if "ptx" in assembly:
        code = assembly["ptx"]
        found = [what for what, pattern in _FORBIDDEN_PTX.items() if pattern.search(code)]
        wide = Counter(what for what, lanes, bits in _ACCESS.findall(code) if int(lanes or 1) * int(bits) >= 128)
        if wide["ld"] < variant.wide_loads:
            found.append(f"{wide['ld']} loads of 16 bytes, not {variant.wide_loads}")
        if wide["st"] < variant.wide_stores:
            found.append(f"{wide['st']} stores of 16 bytes, not {variant.wide_stores}")
        usage = _resource_usage(assembly["cubin"])
        if int(usage.get("LOCAL", "0")) or int(usage.get("STACK", "0")) > STACK_BYTES:
            found.append(f"spills: {usage}")
        return found
    code = assembly["amdgcn"]
    found = [what for what, pattern in _FORBIDDEN_AMD.items() if pattern.search(code)]
    if variant.divides:
        found = [what for what in found if what != "fused multiply-add"]
    return found


def _resource_usage(cubin: bytes) -> dict[str, str]:
    """What the assembler spent on the kernel: REG, STACK, LOCAL, SHARED."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # The program's own line comes before the kernel's: the last value of each counts.
    return dict(re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text))


def compile_all(targets: Iterable[str], *, only: str = "") -> bool:
    """Compile and inspect every variant whose name starts with ``only``, printing a row each. Whether all are sound."""
    sound = True
    chosen = [variant for variant in variants() if variant.name.startswith(only)]
    width = max(len(variant.name) for variant in chosen)
    print(f"triton {triton.__version__}")
    print(f"{'kernel':<{width}}  target  seconds  verdict")
    for target in targets:
        for variant in chosen:
            start = time.perf_counter()
            try:
                compiled = triton.compile(variant.source(), target=TARGETS[target], options=variant.options)
                found = defects(variant, compiled.asm)
            except Exception as error:  # whatever a compiler raises is this row's verdict, and the next row still runs
                found = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
            seconds = time.perf_counter() - start
            print(f"{variant.name:<{width}}  {target:<6}  {seconds:7.2f}  {'; '.join(found) or 'ok'}", flush=True)
            sound = sound and not found
    return sound


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m protrain_kernels.compile",
        description="Compile and inspect every Triton kernel, without a GPU.",
        epilog="example: python -m protrain_kernels.compile --target sm_90 --only adam",
    )
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="one target; may be repeated")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only variants whose name starts so")
    options = parser.parse_args(arguments)
    if not any(variant.name.startswith(options.only) for variant in variants()):
        parser.error(f"no variant starts with {options.only!r}")
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and the interpreter has no machine code: unset it")
    return 0 if compile_all(options.target or TARGETS, only=options.only) else 1


if __name__ == "__main__":
    sys.exit(main())
