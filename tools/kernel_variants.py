"""Every specialisation of every Triton kernel that the launchers compile, for ``compile_kernels`` to build."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
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
from protrain_kernels.cross_entropy import LANES as CROSS_ENTROPY_LANES
from protrain_kernels.cross_entropy import OPTIONS as CROSS_ENTROPY_OPTIONS
from protrain_kernels.cross_entropy import cross_entropy_kernel
from protrain_kernels.flatten_kernels import flatten_kernel, unflatten_kernel
from protrain_kernels.fold import MOST_RANKS, fold_kernel, rows_together
from protrain_kernels.from_host import BLOCK as FROM_HOST_BLOCK
from protrain_kernels.from_host import from_host_kernel
from protrain_kernels.rounding import BF16, FP16, FP32


@dataclasses.dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: what a launch with arguments like these compiles."""

    name: str
    kernel: Any
    pointers: dict[str, str]  # argument -> element type
    integers: dict[str, int]  # argument -> a value: Triton treats 1, multiples of 16 and values beyond 31 bits apart
    constants: dict[str, Any]
    floats: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()  # pointers that are no multiples of 16 bytes
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: LAUNCH_OPTIONS)
    wide_loads: int = 0  # the least number of loads of 16 bytes
    wide_stores: int = 0  # the least number of stores of 16 bytes
    loads_together: int = 0  # the least number of wide loads in a row without a wide store between them
    # Why AMD's code may hold fused multiply-adds: a correctly rounded "root" and division.
    divides: str = ""
    same_bits: bool = True  # as the reference has, so that nothing may be fused, approximated or flushed

    def source(self, backend: str) -> ASTSource:
        """What ``triton.compile`` takes."""
        names = list(self.kernel.arg_names)
        signature = self.signature()
        ones = {name: 1 for name in self.integers if signature[name] == "constexpr"}
        attributes: dict[tuple[int], list[list[str | int]]] = {}
        for name, kind in signature.items():
            if kind.endswith(":16"):
                attributes[(names.index(name),)] = [["tt.divisibility", 16]]
        if backend == "hip":  # a launch on AMD says so of tensors of up to 2 GiB
            for name in self.pointers:
                attributes.setdefault((names.index(name),), []).append(["tt.pointer_range", 32])
        return ASTSource(
            self.kernel,
            {name: signature[name].removesuffix(":16") for name in names},
            constexprs=self.constants | ones,
            attrs=attributes,
        )

    def signature(self) -> dict[str, str]:
        """The type of each argument as Triton names it, with ":16" where the code relies on a multiple of 16."""
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
_TYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
_TILES = {"GROUP": TILE_GROUP, "ROWS": TILE_ROWS, "LANES": TILE_LANES, "UNROLL": TILE_UNROLL}
_TABLES = {"slice_of": "i32", "rows": "i64", "addresses": "i64"}


def variants() -> Iterator[Variant]:
    """What the launchers compile.

    The list of ``cross_entropy`` is a choice, as its constants are a vocabulary and the options of a loss. That of
    ``fold`` has every type for two ranks, and every number of ranks for bf16.
    """
    yield from _adam_variants()
    yield from _flatten_variants()
    yield from _fold_variants()
    yield from _from_host_variants()
    yield from _cross_entropy_variants()


def _adam_variants() -> Iterator[Variant]:
    scalars = "gradient_factor", *AdamScalars._fields
    for weight, master, grads in (
        ("bf16", "i16", ("bf16", "fp32")),
        ("fp16", "fp32", ("fp16", "fp32")),
        ("fp32", "fp32", ("fp32",)),
    ):
        for moment, grad, (scale, l2, large) in product(("fp32", "bf16"), grads, product((False, True), repeat=3)):
            flags = f"{', scale' * scale}{', l2' * l2}{', large' * large}"
            yield Variant(
                name=f"adam {weight}, {grad} gradient{f', {moment} moments' * (moment != 'fp32')}{flags}",
                kernel=adam_kernel,
                pointers={
                    "weight": weight,
                    "master": master,
                    "exp_avg": moment,
                    "exp_avg_sq": moment,
                    "grad": grad,
                    "scale": "fp32" if scale else moment,  # another tensor stands for a scale that is not there
                },
                integers={"numel": _LARGE if large else _SMALL},
                floats=scalars,
                constants={
                    "SPLIT": weight == "bf16",
                    "OWN_MASTER": weight == "fp32",
                    "HAS_SCALE": scale,
                    "HAS_L2": l2,
                    "BLOCK": BLOCK,
                },
                wide_loads=5 if weight == "bf16" else 4,
                wide_stores=4 if weight == "bf16" else 3,
                divides="root",
            )


def _rounded_to(weight: str) -> str:
    return f", squares rounded to {weight}" * (weight != "fp32")


def _flatten_variants() -> Iterator[Variant]:
    for kind, chunk, accumulate, squares, weight in product(_TYPES, _TYPES, (False, True), (False, True), _TYPES):
        if chunk != "fp32" and (accumulate or weight != "fp32"):
            continue
        if not squares and weight != "fp32":
            continue
        told = f"{', accumulate' * accumulate}{', no squares' * (not squares)}{_rounded_to(weight)}"
        yield Variant(
            name=f"flatten {kind} into {chunk}{told}",
            kernel=flatten_kernel,
            # The chunk stands for partials that are not there.
            pointers={**_TABLES, "chunk": chunk, "partials": "fp32" if squares else chunk},
            integers={"slot": 0},
            constants={
                "TYPE": _TYPES[kind],
                "ACCUMULATE": accumulate,
                "SQUARES": squares,
                "ROUNDED": _TYPES[weight],
                **_TILES,
            },
            options=TILE_OPTIONS,
            wide_loads=TILE_UNROLL,
            loads_together=TILE_UNROLL,
            wide_stores=TILE_UNROLL // (2 if accumulate else 1),
        )
    for kind, chunk in product(_TYPES, _TYPES):
        yield Variant(
            name=f"unflatten {chunk} into {kind}",
            kernel=unflatten_kernel,
            pointers={**_TABLES, "chunk": chunk},
            integers={"slot": 0},
            constants={"TYPE": _TYPES[kind], **_TILES},
            options=TILE_OPTIONS,
            wide_loads=TILE_UNROLL,
            loads_together=TILE_UNROLL,
            wide_stores=TILE_UNROLL,
        )


def _fold_variants() -> Iterator[Variant]:
    kept: list[tuple[str | None, bool]] = [(None, False), *product(_TYPES, (False, True))]  # gradient type, squares
    two = [
        (2, kind, gradient, accumulate, squares)
        for kind, accumulate, (gradient, squares) in product(_TYPES, (False, True), kept)
        if gradient or accumulate
    ]
    others = product((1, *range(3, MOST_RANKS + 1)), ("bf16",), ("bf16",), (False, True), (True,))
    for ranks, kind, gradient, accumulate, squares in (*two, *others):
        target = f" into {gradient}" if gradient else ""
        told = f"{', accumulate' * accumulate}{', no squares' * (gradient is not None and not squares)}"
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
        together = rows_together(ranks, dtype, accumulate=accumulate)
        loads = together * (ranks * dtype.itemsize // 2 + (2 if accumulate else 0))
        yield Variant(
            name=f"fold {ranks} {kind}{target}{told}",
            kernel=fold_kernel,
            pointers={
                "slice_of": "i32",
                "rows": "i64",
                "pieces": kind,
                "gradient": gradient or kind,  # the pieces stand for a tensor that is not there
                "accumulator": "fp32" if accumulate else kind,
                "partials": "fp32" if squares else kind,
            },
            integers={"stride": _SMALL},
            floats=("factor",),
            constants={
                "RANKS": ranks,
                "GRADIENT": gradient is not None,
                "ACCUMULATE": accumulate,
                "SQUARES": squares,
                **_TILES,
                "UNROLL": together,
            },
            options=TILE_OPTIONS,
            wide_loads=loads,
            loads_together=loads,
            wide_stores=together * ((2 if accumulate else 0) + (2 if gradient == "fp32" else gradient is not None)),
        )


def _from_host_variants() -> Iterator[Variant]:
    for kind, large in product(("u8", "i64"), (False, True)):
        yield Variant(
            name=f"from_host {kind}{', large' * large}",
            kernel=from_host_kernel,
            pointers={"source": kind, "target": kind},
            integers={"numel": _LARGE if large else _SMALL},
            constants={"BLOCK": FROM_HOST_BLOCK},
            wide_loads=4 if kind == "i64" else 0,
            wide_stores=4 if kind == "i64" else 0,
        )


def _cross_entropy_variants() -> Iterator[Variant]:
    """The words of LLaMA-2 and of GPT-2, whose rows end amid 16 bytes; without a softcap and with one."""
    vocabularies = (50257, 50304), (32000, 32000)
    for kind, writes, (words, stride), capped in product(_TYPES, (False, True), vocabularies, (False, True)):
        even = words % 16 == 0
        loads = 2 if kind == "fp32" else 1
        yield Variant(
            name=f"cross_entropy {kind}, {words} words{', no gradient' * (not writes)}{', a softcap' * capped}",
            kernel=cross_entropy_kernel,
            pointers={"logits": kind, "targets": "i64", "losses": "fp32", "divisor": "fp32"},
            integers={"ignore_index": -100},
            constants={
                "WORDS": words,
                "STRIDE": stride,
                "SOFTCAP": 30.0 if capped else 0.0,
                "WRITES": writes,
                "LANES": CROSS_ENTROPY_LANES,
            },
            options=CROSS_ENTROPY_OPTIONS,
            wide_loads=loads * (2 if writes else 1) * even,
            wide_stores=loads * writes * even,
            same_bits=False,
        )
