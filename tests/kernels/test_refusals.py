"""What would be silently wrong is refused, and the error names the argument and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from protrain_kernels import (
    AdamStaging,
    Slice,
    adam,
    adam_scalars,
    flatten,
    fold,
    from_host,
    join,
    pack,
    split,
    streamed_adam,
    unflatten,
    unpack,
)

BF16, FP16, I16, U8 = torch.bfloat16, torch.float16, torch.int16, torch.uint8
STATES: dict[str, Any] = {
    "weight": torch.zeros(256, dtype=BF16),
    "master": torch.zeros(256, dtype=I16),
    "exp_avg": torch.zeros(256),
    "exp_avg_sq": torch.zeros(256),
}
GRAD = torch.zeros(256, dtype=BF16)
BUFFER = pack([torch.zeros(100)])
Case = tuple[Callable[..., object], dict[str, Any], str]  # a call, its arguments, and words of the error


def _scalars(**changes: Any) -> Any:
    usual = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 1, "decoupled": True}
    return adam_scalars(**(usual | changes))


_adam = partial(adam, **STATES, grad=GRAD, scalars=_scalars())
SCALARS: list[Case] = [
    *((_scalars, {"step": step}, f"step counts from 1, in whole numbers, not {step}") for step in (0, -1, 1.5)),
    *((_scalars, {"step": step}, "step counts from 1") for step in (math.nan, math.inf)),
    *((_scalars, {name: bad}, name) for name, bad in (("lr", -1.0), ("eps", math.nan), ("weight_decay", math.inf))),
    *((_scalars, {name: bad}, f"{name} must be in [0, 1)") for name, bad in (("beta1", 1.0), ("beta2", -0.1))),
    # As infinities they would make weights NaN, or leave them for good.
    *((_scalars, {name: 1e39}, "float32 cannot hold the constants of a step with lr") for name in ("lr", "eps")),
    (_scalars, {"weight_decay": 1e300, "decoupled": False}, "float32 cannot hold the constants of a step with lr"),
]
ADAM: list[Case] = [
    (_adam, {"master": None}, "master of a torch.bfloat16 weight must be a torch.int16 tensor"),
    (_adam, {"weight": torch.zeros(256)}, "master of a torch.float32 weight must be None"),
    (_adam, {"weight": torch.zeros(256).double()}, "weight must be"),
    (_adam, {"weight": torch.zeros(100, dtype=BF16)}, "weight has 100 elements: pad it to a multiple of 128"),
    (_adam, {"exp_avg": torch.zeros(128)}, "exp_avg has 128 elements and needs 256"),
    (_adam, {"exp_avg": torch.zeros(256).half()}, "exp_avg must be torch.float32 or torch.bfloat16"),
    (_adam, {"exp_avg_sq": torch.zeros(256, dtype=BF16)}, "exp_avg_sq must be torch.float32"),
    (_adam, {"grad": torch.zeros(256).half()}, "grad must be"),
    (_adam, {"grad": torch.zeros(384, dtype=BF16)[64:320]}, "grad must start at a multiple of 256 bytes"),
    (_adam, {"grad": torch._neg_view(GRAD)}, "negates what its memory holds: pass grad.resolve_neg()"),
    (_adam, {"gradient_factor": 0.5}, "gradient_factor is 0.5, and a torch.bfloat16 gradient is finished"),
    (_adam, {"scale": torch.zeros(2)}, "scale must be one float32"),
    (_adam, {"threads": -1}, "threads must be 0"),
    (_adam, dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros(256)), "exp_avg_sq overlaps exp_avg: pass memory of"),
    (_adam, dict.fromkeys(("weight", "grad"), torch.zeros(256, dtype=BF16)), "grad overlaps weight: pass memory"),
    (_adam, dict.fromkeys(("weight", "grad"), torch.zeros(256, device="meta")), "weight is on meta: the kernels take"),
]


def _new(**changes: Any) -> Any:
    """A second copy of the states, but for some of them."""
    return tuple(({name: state.clone() for name, state in STATES.items()} | changes).values())


SAME = torch.zeros(256)
OUT: list[Case] = [
    (_adam, {"out": out}, message)
    for out, message in (
        (_new(exp_avg=STATES["exp_avg"]), "out.exp_avg overlaps exp_avg"),
        (_new(exp_avg=STATES["exp_avg_sq"]), "exp_avg_sq"),
        (_new(exp_avg=SAME, exp_avg_sq=SAME), "out.exp_avg_sq overlaps out.exp_avg"),
        (_new(weight=GRAD), "out.weight"),
        (_new(master=None), "out.master must be torch.int16, not None"),
        (_new(weight=GRAD.half()), "out.weight must be torch.bfloat16"),
        (_new(weight=torch.zeros(128, dtype=BF16)), "out.weight has 128 elements and needs 256"),
        (STATES["weight"], "out.weight overlaps weight"),
        (GRAD.half(), "out.weight must be torch.bfloat16"),
        (torch.zeros(128, dtype=BF16), "out.weight has 128 elements and needs 256"),
    )
]
_streamed = partial(
    streamed_adam, **STATES, grad=GRAD, scalars=_scalars(), staging=AdamStaging(torch.device("cpu"), size_bytes=1 << 16)
)
STREAMED: list[Case] = [
    (_streamed, {"exp_avg": torch.zeros(128)}, "exp_avg has 128 elements"),
    (_streamed, {"scale": torch.zeros(2)}, "scale must be one float32"),
    (_streamed, {"weight": torch.zeros(256, dtype=BF16, device="meta")}, "weight must be in pinned host memory for"),
    (_streamed, {"gradient_factor": 0.5}, "gradient_factor is 0.5, and a torch.bfloat16 gradient is finished"),
]
_flatten = partial(
    flatten,
    tensors=[torch.zeros(200, dtype=BF16)],
    chunk=torch.zeros(256, dtype=BF16),
    offsets=[0],
    partials=torch.zeros(1),
    partial_offsets=[0],
)
_two = partial(flatten, chunk=torch.zeros(512), offsets=[0, 128])
FLATTEN: list[Case] = [
    (_flatten, {"offsets": [64]}, "offset is 64: it must be at least 0 and a multiple of 128"),
    (_flatten, {"offsets": [256]}, "the pieces reach to element 512 of 256"),
    (_flatten, {"offsets": [-128]}, "offset is -128"),
    (_flatten, {"partial_offsets": [1]}, "the pieces write partials up to 2 of 1"),
    (_flatten, {"partials": None}, "partials and partial_offsets come together"),
    (_flatten, {"partial_offsets": [-1]}, "partial_offset is -1"),
    (_flatten, {"offsets": []}, "1 tensors need as many offsets"),
    (_flatten, {"tensors": [torch.zeros(200).int()]}, "tensors[0] must be torch.bfloat16 or"),
    (_flatten, {"tensors": [torch.zeros(20, 10).t()]}, "tensors[0] must be contiguous"),
    (_flatten, {"tensors": [torch._neg_view(torch.zeros(200))]}, "negates what its memory holds: pass tensors[0].res"),
    (_flatten, {"tensors": [torch.zeros(200, device="meta")]}, "is on meta"),
    (_flatten, {"accumulate": True}, "accumulate in a float32 chunk"),
    (_flatten, {"chunk": torch.zeros(300, dtype=BF16)}, "chunk has 300 elements"),
    (_flatten, {"weight_dtype": I16}, "weight_dtype must be one of"),
    (_two, {"tensors": [torch.zeros(200), torch.zeros(100)]}, "piece 1 begins at 128, where another reaches to 256"),
    (_two, {"tensors": [torch.zeros(9), torch.zeros(9).half()]}, "tensors[1] is torch.float16, tensors[0] torch.fl"),
    (
        unflatten,
        {"chunk": SAME, "tensors": [torch.zeros(9), torch.zeros(9, device="meta")], "offsets": [0, 128]},
        "tensors[1] is on meta, tensors[0] on cpu",
    ),
]
_slice = partial(Slice, offset=0, numel=200, first=0, parameter_numel=200, partial_offset=0)
_fold = partial(
    fold, pieces=torch.zeros(2, 256), slices=[_slice()], gradient=torch.zeros(256), factor=1.0, partials=torch.zeros(1)
)
FOLD: list[Case] = [
    (_slice, {"offset": 64}, "offset is 64: it must be at least 0 and a multiple of 128"),
    (_slice, {"offset": -128}, "offset is -128"),
    (_slice, {"first": 64}, "first is 64: it must be at least 0 and a multiple of 128"),
    (_slice, {"numel": -1}, "numel is -1: it must be at least 0"),
    (_slice, {"partial_offset": -1}, "partial_offset is -1: it must be at least 0"),
    (_slice, {"first": 128}, "200 elements from element 128 on reaches beyond its parameter, which has 200"),
    (_slice, {"numel": 100}, "numel is 100: it must be a multiple of 128 where the slice ends before its parameter"),
    (_fold, {"pieces": torch.zeros(2, 256).int()}, "pieces must be torch.bfloat16 or"),
    (_fold, {"pieces": torch._neg_view(torch.zeros(2, 256))}, "pieces is a view that negates"),
    (_fold, {"pieces": torch.zeros(256)}, "pieces must be [ranks, elements], each contiguous"),
    (_fold, {"pieces": torch.zeros(256, 2).t()}, "pieces must be [ranks, elements], each contiguous"),
    (_fold, {"pieces": torch.zeros(0, 256)}, "pieces of 0 ranks: fold 1 to 16 at a time"),
    (_fold, {"pieces": torch.zeros(17, 256)}, "pieces of 17 ranks: fold 1 to 16 at a time"),
    (_fold, {"pieces": torch.zeros(2, 200)}, "pieces have 200 elements each: pad them to a multiple of 128"),
    (_fold, {"pieces": torch.zeros(513)[1:].view(2, 256)}, "pieces must start at a multiple of 256 bytes"),
    (_fold, {"pieces": torch.zeros(2, 128)}, "the pieces reach to element 256 of 128"),
    (_fold, {"slices": [_slice(offset=128)]}, "the pieces reach to element 384 of 256"),
    (_fold, {"slices": [_slice(), _slice(offset=128)]}, "piece 1 begins at 128, where another reaches to 256"),
    (_fold, {"slices": [_slice(partial_offset=1)]}, "the pieces write partials up to 2 of 1"),
    (_fold, {"gradient": torch.zeros(256).int()}, "gradient must be torch.bfloat16 or"),
    (_fold, {"gradient": torch.zeros(384)}, "gradient has 384 elements and needs 256"),
    (_fold, {"gradient": torch.zeros(257)[1:]}, "gradient must start at a multiple of 256 bytes"),
    (_fold, {"gradient": torch.zeros(256, device="meta")}, "gradient is on meta"),
    (_fold, {"gradient": None}, "fold has nowhere to write"),
    (_fold, {"gradient": None, "accumulator": SAME}, "partials are of the gradient"),
    (_fold, {"gradient": SAME, "accumulator": SAME}, "gradient and accumulator are the same memory"),
    (_fold, {"accumulator": torch.zeros(256, dtype=BF16)}, "accumulator must be torch.float32"),
    (_fold, {"accumulator": torch.zeros(128)}, "accumulator has 128 elements and needs 256"),
    (_fold, {"partials": torch.zeros(1).double()}, "partials must be torch.float32"),
]
_from_host = partial(from_host, source=torch.zeros(8, dtype=U8), target=torch.zeros(8, dtype=U8))
OTHERS: list[Case] = [
    (_from_host, {"source": torch.zeros(8)}, "source must be torch.uint8, not torch.float32"),
    (_from_host, {"target": torch.zeros(4, dtype=U8)}, "target has 4 elements and needs 8"),
    (_from_host, {"source": torch.zeros(16, dtype=U8)[::2]}, "source must be 1-d and contiguous"),
    (_from_host, {"source": torch.zeros(8, dtype=U8, device="meta")}, "source is on meta"),
    (unpack, {"packed": BUFFER._replace(buffer=torch.zeros(400))}, "buffer must be torch.uint8"),
    (unpack, {"packed": BUFFER._replace(buffer=torch.zeros(520, dtype=U8)[8:])}, "buffer must start at a multiple of"),
    (pack, {"tensors": [SAME, torch.zeros(2, device="meta")]}, "tensors[1] is on meta, tensors[0] on cpu"),
    (pack, {"tensors": [torch.eye(3).to_sparse()]}, "tensors[0] must be a plain strided tensor"),
    (pack, {"tensors": [torch._neg_view(torch.ones(4))]}, "tensors[0] must be a plain strided tensor"),
    (split, {"master": torch.zeros(8).double()}, "master must be torch.float32, not torch.float64"),
    (
        join,
        {"weight": torch.zeros(8).half(), "remainder": torch.zeros(8, dtype=I16)},
        "must be bfloat16 and int16, not torch.float16 and torch.int16",
    ),
]


@pytest.mark.parametrize(
    ("call", "changes", "message"), [*SCALARS, *ADAM, *OUT, *STREAMED, *FLATTEN, *FOLD, *OTHERS], ids=lambda value: ""
)
def test_bad_arguments_are_named(
    compiled: None, call: Callable[..., object], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(**changes)
