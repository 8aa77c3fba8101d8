"""Prints launches whose specialisation isn't among what is compiled ahead of time, then the kernels that were launched.

A script, since a test process interprets the kernels: ``python tests/kernels/record_launches.py``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from protrain_kernels import Slice, adam_scalars
from protrain_kernels.adam import launch_adam
from protrain_kernels.cross_entropy import launch_cross_entropy
from protrain_kernels.flatten import launch_flatten, launch_unflatten, table_for
from protrain_kernels.fold import MOST_RANKS, launch_fold
from protrain_kernels.from_host import launch_from_host
from protrain_kernels.slices import RowTable
from tools.kernel_variants import variants

BF16, FP16, FP32, I16, U8 = torch.bfloat16, torch.float16, torch.float32, torch.int16, torch.uint8
NAMES = {BF16: "*i16", FP16: "*fp16", FP32: "*fp32", I16: "*i16", U8: "*u8"}
NAMES |= {torch.int32: "*i32", torch.int64: "*i64"}
LARGE = 1 << 32

known: dict[Any, set[object]] = defaultdict(set)
launched: set[str] = set()


def record(
    kernel: Any,
    programs: int,
    tensors: Sequence[torch.Tensor],
    integer: int,
    floats: Sequence[float],
    constants: Sequence[Any],
    options: Any,
    **where: Any,
) -> None:
    """Stands in for ``launch``."""
    found = {}
    arguments: tuple[Any, ...] = (*tensors, integer, *floats)
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        if isinstance(argument, torch.Tensor):
            multiple = argument.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
            found[parameter.name] = NAMES[argument.dtype] + ":16" * multiple
        elif isinstance(argument, float):
            found[parameter.name] = "fp32"
        elif argument == 1 and not parameter.do_not_specialize:
            found[parameter.name] = "constexpr"
        else:
            multiple = argument % 16 == 0 and not parameter.do_not_specialize
            found[parameter.name] = ("i64" if argument >= 1 << 31 else "i32") + ":16" * multiple
    names = kernel.arg_names[len(arguments) :]
    values = dict(zip(names, constants, strict=True))
    launched.add(kernel.fn.__name__)
    if key(kernel, found | dict.fromkeys(names, "constexpr"), values) not in known[kernel]:
        print("not compiled ahead of time:", kernel.fn.__name__, found, values)


def key(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> object:
    """What tells specialisations apart."""
    return frozenset(signature.items()), frozenset(constants.items())


def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Of any size: a large one has no memory."""
    return torch.empty(numel, dtype=dtype, device="meta" if numel >= 1 << 20 else "cpu")


def flatten_launches() -> None:
    """Every type and choice."""
    for kind, chunk in product((BF16, FP16, FP32), (BF16, FP16, FP32)):
        tensors, target = [torch.zeros(256, dtype=kind)], torch.zeros(256, dtype=chunk)
        table = table_for(tensors, [0], [0])
        launch_unflatten(table, target, tensors)
        for accumulate, sums, weight in product((False, True), (None, torch.zeros(600)[1:]), (BF16, FP16, FP32)):
            if not accumulate or chunk == FP32:
                launch_flatten(table, tensors, target, sums, accumulate=accumulate, weight_dtype=weight)


def fold_launches() -> None:
    """Every type and choice with two ranks, and every number of ranks in bf16."""
    part = Slice(offset=0, numel=256, first=0, parameter_numel=256, partial_offset=0)
    table = RowTable([part], torch.device("cpu"))
    sums, squares = torch.zeros(256), torch.zeros(600)[1:]
    for kind, target, accumulator in product((BF16, FP16, FP32), (None, BF16, FP16, FP32), (None, sums)):
        gradient = None if target is None else torch.zeros(256, dtype=target)
        for partials in (None, squares):
            if gradient is not None or (accumulator is not None and partials is None):
                pieces = torch.zeros(2, 256, dtype=kind)
                launch_fold(table, pieces, gradient=gradient, accumulator=accumulator, factor=0.5, partials=partials)
    for ranks, accumulator in product(range(1, MOST_RANKS + 1), (None, sums)):
        pieces, gradient = torch.zeros(ranks, 256, dtype=BF16), torch.zeros(256, dtype=BF16)
        launch_fold(table, pieces, gradient=gradient, accumulator=accumulator, factor=1.0, partials=squares)


def adam_launches() -> None:
    """Every type and choice, below and beyond 2^31 parameters."""
    for weight, moment, grad_type, scale, l2, numel in product(
        (BF16, FP16, FP32), (FP32, BF16), (None, FP32), (None, torch.zeros(8)[3:4]), (0.0, 0.1), (128, LARGE)
    ):
        scalars = adam_scalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=l2, step=3, decoupled=False)
        master = None if weight == FP32 else empty(numel, I16 if weight == BF16 else FP32)
        exp_avg, exp_avg_sq, grad = empty(numel, moment), empty(numel, moment), empty(numel, grad_type or weight)
        states = (empty(numel, weight), master, exp_avg, exp_avg_sq, grad)
        launch_adam(*states, scalars, scale=scale)


def cross_entropy_launches() -> None:
    """Every type, with and without gradients, and a vocabulary whose rows are wider than it is."""
    targets, losses, divisor = torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.ones(())
    for kind, (words, stride), softcap, writes in product(
        (BF16, FP16, FP32), ((32000, 32000), (50257, 50304)), (0.0, 30.0), (False, True)
    ):
        logits = torch.zeros(2, stride, dtype=kind)[:, :words]
        launch_cross_entropy(logits, targets, losses, divisor, ignore_index=-100, softcap=softcap, writes=writes)


def other_launches() -> None:
    """Lengths that Triton tells apart."""
    for numel in (1, 8, 17, 128, LARGE - 1, 8 * LARGE):
        launch_from_host(empty(numel, U8), empty(numel, U8))


def main() -> None:
    for variant in variants():
        known[variant.kernel].add(key(variant.kernel, variant.signature(), variant.constants))
    modules = "adam cross_entropy flatten fold from_host"
    for module in modules.split():
        sys.modules[f"protrain_kernels.{module}"].__dict__["launch"] = record
    flatten_launches()
    fold_launches()
    adam_launches()
    cross_entropy_launches()
    other_launches()
    print("launched:", *sorted(launched))


if __name__ == "__main__":
    main()
