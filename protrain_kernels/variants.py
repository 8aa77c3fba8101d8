"""What the launchers compile: every specialisation of every kernel, for ``compile`` to build without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any

from triton.compiler import ASTSource

from protrain_kernels.adam import BLOCK, adam_kernel
from protrain_kernels.adam_types import AdamScalars
from protrain_kernels.checks import (
    LAUNCH_OPTIONS,
    TILE_GROUP,
    TILE_LANES,
    TILE_OPTIONS,
    TILE_ROWS,
    TILE_UNROLL,
)
from protrain_kernels.flatten_kernels import BF16, FP16, FP32, MIXED, flatten_kernel, unflatten_kernel
from protrain_kernels.from_host import BLOCK as FROM_HOST_BLOCK
from protrain_kernels.from_host import from_host_kernel
from protrain_kernels.pack import PACK_OPTIONS, PACK_STEPS
from protrain_kernels.pack_kernels import pack_kernel, unpack_kernel
from protrain_kernels.pack_layout import BITS, FP8, GATHER, MASK, RAW, TILE
from protrain_kernels.split_master import BLOCK as SPLIT_BLOCK
from protrain_kernels.split_master import join_kernel, split_kernel
from protrain_kernels.streamed_adam import streamed_adam_kernel
from protrain_kernels.sum_of_squares import sum_of_squares_kernel


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
    loads_together: int = 0  # at least so many of the wide loads without a wide store between them
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
    yield from _from_host_variants(every)
    yield from _pack_variants()


def _adam_variants(every: bool) -> Iterator[Variant]:
    scalars = tuple(field.name for field in dataclasses.fields(AdamScalars))
    for weight, master, grads in (
        ("bf16", "i16", ("bf16", "fp32")),
        ("fp16", "fp32", ("fp16", "fp32")),
        ("fp32", "fp32", ("fp32",)),
    ):
        for moment, grad, (scale, skip, l2, large) in product(
            ("fp32", "bf16"), grads, product((False, True), repeat=4)
        ):
            if not every and ((skip and not scale) or large or (moment == "bf16" and grad != weight)):
                continue
            shared: dict[str, Any] = {
                "pointers": {
                    "weight": weight,
                    "master": master,
                    "exp_avg": moment,
                    "exp_avg_sq": moment,
                    "grad": grad,
                    "scale": "fp32" if scale else moment,  # what isn't read is another tensor
                    "skip": "i32" if skip else moment,
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
            flags = f"{', scale' * scale}{', skip' * skip}{', l2' * l2}{', large' * large}"
            what = f"{weight}, {grad} gradient{f', {moment} moments' * (moment != 'fp32')}{flags}"
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
            loads_together=TILE_UNROLL,
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
            loads_together=TILE_UNROLL,
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


def _from_host_variants(every: bool) -> Iterator[Variant]:
    for kind, large in product(("u8", "i64"), (False, True)):
        if every or not large:
            yield Variant(
                name=f"from_host {kind}{', large' * large}",
                kernel=from_host_kernel,
                pointers={"source": kind, "target": kind},
                integers={"numel": _LARGE if large else _SMALL},
                constants={"BLOCK": FROM_HOST_BLOCK},
                wide_loads=4 if kind == "i64" else 0,
                wide_stores=4 if kind == "i64" else 0,
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
