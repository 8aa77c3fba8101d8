"""Compiles the Triton kernels' variants ahead of time, for GPUs that this machine need not have, and inspects the code.

    python -m protrain_kernels.compile                  every target
    python -m protrain_kernels.compile --target sm_90   one of them
    python -m protrain_kernels.compile --every          every combination of a launch's choices, in minutes a target

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


_FORBIDDEN_LLIR = {
    "fused multiply-add asked for": re.compile(r"@llvm\.fma\."),
    "fused multiply-add allowed": re.compile(
        r"@llvm\.fmuladd\.|\bf(?:add|sub|mul|div|neg) (?:\w+ )*(?:contract|fast)\b"
    ),
    "inexact arithmetic allowed": re.compile(r"\bf(?:add|sub|mul|div|neg) (?:\w+ )*(?:reassoc|arcp|afn)\b"),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: what a launch with arguments like these compiles."""

    name: str
    kernel: Any
    pointers: dict[str, str]  # argument -> element type
    integers: dict[str, int]  # argument -> a value: Triton tells 1, multiples of 16 and more than 31 bits from others
    constants: dict[str, Any]
    floats: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()  # pointers that aren't multiples of 16 bytes
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: LAUNCH_OPTIONS)
    wide_loads: int = 0  # at least so many loads of 16 bytes
    wide_stores: int = 0  # at least so many stores of 16 bytes
    # What AMD makes of fused multiply-adds: correctly rounded "root" and division, 64-bit "integer division".
    divides: str = ""

    def source(self, backend: str) -> ASTSource:
        """What ``triton.compile`` takes."""
        names = list(self.kernel.arg_names)
        signature = self.signature()
        ones = {name: 1 for name in self.integers if signature[name] == "constexpr"}
        attributes: dict[tuple[int], list[list[str | int]]] = {}
        for name, kind in signature.items():
            if kind.endswith(":16"):
                attributes[(names.index(name),)] = [["tt.divisibility", 16]]
        if backend == "hip":  # what its launches add for tensors of up to 2 GiB
            for name in self.pointers:
                attributes.setdefault((names.index(name),), []).append(["tt.pointer_range", 32])
        return ASTSource(
            self.kernel,
            {name: signature[name].removesuffix(":16") for name in names},
            constexprs=self.constants | ones,
            attrs=attributes,
        )

    def signature(self) -> dict[str, str]:
        """The type of each argument as Triton names it, with ":16" where it counts on a multiple of 16."""
        kinds = {name: f"*{kind.replace('bf16', 'i16')}" for name, kind in self.pointers.items()}  # see as_bits
        for name in kinds:
            parameter = self.kernel.params[self.kernel.arg_names.index(name)]
            if name not in self.unaligned and not parameter.do_not_specialize_on_alignment:
                kinds[name] += ":16"
        for name, value in self.integers.items():
            kinds[name] = "i64" if value >= 1 << 31 else "i32"
            if not self.kernel.params[self.kernel.arg_names.index(name)].do_not_specialize:
                kinds[name] = "constexpr" if value == 1 else kinds[name] + ":16" * (value % 16 == 0)
        return kinds | dict.fromkeys(self.floats, "fp32") | dict.fromkeys(self.constants, "constexpr")


_SMALL, _LARGE = 4096, 1 << 32  # lengths that are multiples of 16


def variants(*, every: bool = False) -> Iterator[Variant]:
    """What the launchers compile: a choice that has each part at least once, or ``every`` combination.

    Even ``every`` leaves some freedom of ``pack``, whose constants say what a block's activations are, and dimensions
    beyond 8.
    """
    yield from _adam_variants(every)
    yield from _sum_variants(every)
    yield from _flatten_variants(every)
    yield from _unflatten_variants(every)
    yield from _split_variants(every)
    yield from _pack_variants()


def _adam_variants(every: bool) -> Iterator[Variant]:
    scalars = tuple(field.name for field in dataclasses.fields(AdamScalars))
    for weight, master, grads in (
        ("bf16", "i16", ("bf16", "fp32")),
        ("fp16", "fp32", ("fp16", "fp32")),
        ("fp32", "fp32", ("fp32",)),
    ):
        for grad, (scale, skip, l2, large) in product(grads, product((False, True), repeat=4)):
            if not every and ((skip and not scale) or large):
                continue
            shared: dict[str, Any] = {
                "pointers": {
                    "weight": weight,
                    "master": master,
                    "exp_avg": "fp32",
                    "exp_avg_sq": "fp32",
                    "grad": grad,
                    "scale": "fp32",
                    "skip": "i32" if skip else "fp32",  # what isn't read is another tensor
                },
                "integers": {"numel": _LARGE if large else _SMALL},
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
                "divides": "root",
            }
            what = f"{weight}, {grad} gradient{', scale' * scale}{', skip' * skip}{', l2' * l2}{', large' * large}"
            yield Variant(name=f"adam {what}", kernel=adam_kernel, **shared)
            if every or (scale == skip and not l2):
                yield Variant(name=f"streamed adam {what}", kernel=streamed_adam_kernel, **shared)


_TILES = {"GROUP": TILE_GROUP, "ROWS": TILE_ROWS, "LANES": TILE_LANES, "UNROLL": TILE_UNROLL}
_CODES = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "mixed": MIXED}


def _sum_variants(every: bool) -> Iterator[Variant]:
    for kind, aligned, large in product(("bf16", "fp16", "fp32"), (True, False), (False, True)):
        if every or (aligned and not large):
            yield Variant(
                name=f"sum_of_squares {kind}{', unaligned' * (not aligned)}{', large' * large}",
                kernel=sum_of_squares_kernel,
                pointers={"values": kind, "partials": "fp32"},
                integers={"numel": _LARGE if large else _SMALL},
                unaligned=() if aligned else ("values",),
                constants=_TILES,
                options=TILE_OPTIONS,
                wide_loads=TILE_UNROLL if aligned else 0,
            )


_TABLES = {"tensor_of": "i32", "rows": "i64", "addresses": "i64"}
_LAYOUTS = {"": (0, False), ", 1-d": (1, False), ", 2-d": (2, False), ", strided": (4, False), ", 8-d": (8, False)}
_LAYOUTS |= {f"{name}, wide": (dims, True) for name, (dims, _) in _LAYOUTS.items() if dims}


def _flatten_variants(every: bool) -> Iterator[Variant]:
    flags = product((False, True), (False, True), (True, False), (False, True))
    for (accumulate, scale, squares, finite), kind, chunk, layout in product(
        flags, _CODES, ("bf16", "fp16", "fp32"), _LAYOUTS
    ):
        if accumulate and chunk != "fp32":
            continue
        plain = squares and not layout and not scale  # as the engine calls it
        chosen = (
            (plain and (kind == chunk or not finite) and (kind != "mixed" or chunk == "fp32"))
            or (scale and finite and squares and kind in (chunk, "mixed") and layout in ("", ", strided"))
            or (squares and not finite and kind == "mixed" and layout == ", strided, wide")
            or (not squares and not finite and not scale and kind == chunk and not layout)
        )
        if not (every or chosen):
            continue
        dims, wide = _LAYOUTS[layout]
        told = (", accumulate" * accumulate, ", scale" * scale, ", no squares" * (not squares), ", finite" * finite)
        # What isn't read is the chunk: see launch_flatten.
        others = {"partials": squares, "scale": scale, "nonfinite": finite}
        types = {"partials": "fp32", "scale": "fp32", "nonfinite": "i32"}
        yield Variant(
            name=f"flatten {kind} into {chunk}{''.join(told)}{layout}",
            kernel=flatten_kernel,
            pointers={**_TABLES, "chunk": chunk, **{n: types[n] if used else chunk for n, used in others.items()}},
            integers={"slot": 0},
            constants={
                "TYPE": _CODES[kind],
                "DIMS": dims,
                "WIDE": wide,
                "ACCUMULATE": accumulate,
                "HAS_SCALE": scale,
                "SQUARES": squares,
                "FINITE": finite,
                **_TILES,
            },
            options=TILE_OPTIONS,
            wide_loads=TILE_UNROLL * (3 if kind == "mixed" else 1),
            wide_stores=TILE_UNROLL // (2 if accumulate else 1) * (3 if kind == "mixed" else 1),
            divides="integer division" if wide else "",
        )


def _unflatten_variants(every: bool) -> Iterator[Variant]:
    for kind, chunk, scale, layout in product(_CODES, ("bf16", "fp16", "fp32"), (False, True), _LAYOUTS):
        chosen = (not scale and not layout and (kind != "mixed" or chunk == "bf16")) or (
            scale and kind in (chunk, "mixed") and layout in (", strided", ", strided, wide")
        )
        if not (every or chosen):
            continue
        dims, wide = _LAYOUTS[layout]
        yield Variant(
            name=f"unflatten {chunk} into {kind}{', scale' * scale}{layout}",
            kernel=unflatten_kernel,
            pointers={**_TABLES, "chunk": chunk, "scale": "fp32" if scale else chunk},
            integers={"slot": 0},
            constants={"TYPE": _CODES[kind], "DIMS": dims, "WIDE": wide, "HAS_SCALE": scale, **_TILES},
            options=TILE_OPTIONS,
            wide_loads=TILE_UNROLL * (3 if kind == "mixed" else 1),
            wide_stores=TILE_UNROLL * (3 if kind == "mixed" else 1),
            divides="integer division" if wide else "",
        )


def _split_variants(every: bool) -> Iterator[Variant]:
    split = {"master": "fp32", "weight": "bf16", "remainder": "i16"}
    for (name, kernel), numel in product((("split", split_kernel), ("join", join_kernel)), (_SMALL, 1, 17, _LARGE)):
        if not every and numel != _SMALL:
            continue
        multiple = numel % 16 == 0
        yield Variant(
            name=f"{name}{', large' * (numel == _LARGE)}{f', {numel}' * (not multiple)}",
            kernel=kernel,
            pointers=split,
            integers={"numel": numel},
            constants={"BLOCK": SPLIT_BLOCK},
            wide_loads=2 if multiple else 0,
            wide_stores=2 if multiple else 0,
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
                integers={"slot": 0},
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
                divides="integer division" if dims > 4 else "",
                wide_loads=loads,
                wide_stores=stores,
            )


def defects(variant: Variant, compiled: Any) -> list[str]:
    """What is wrong with the machine code of ``variant``; nothing is the good answer."""
    assembly = compiled.asm
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


def compile_all(targets: Iterable[str], *, only: str = "", every: bool = False) -> bool:
    """Compile and inspect the variants whose name starts with ``only``, printing a row each. Whether all are sound."""
    sound = True
    chosen = [variant for variant in variants(every=every) if variant.name.startswith(only)]
    width = max(len(variant.name) for variant in chosen)
    print(f"triton {triton.__version__}")
    print(f"{'kernel':<{width}}  target  seconds  verdict")
    for target in targets:
        for variant in chosen:
            start = time.perf_counter()
            try:
                compiled = triton.compile(
                    variant.source(TARGETS[target].backend), target=TARGETS[target], options=variant.options
                )
                found = defects(variant, compiled)
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
    parser.add_argument("--every", action="store_true", help="every combination, not a choice: minutes a target")
    options = parser.parse_args(arguments)
    if not any(variant.name.startswith(options.only) for variant in variants(every=options.every)):
        parser.error(f"no variant starts with {options.only!r}")
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and the interpreter has no machine code: unset it")
    return 0 if compile_all(options.target or TARGETS, only=options.only, every=options.every) else 1


if __name__ == "__main__":
    sys.exit(main())
