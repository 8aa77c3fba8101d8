"""The host kernels: special values, few threads, and a free GIL."""

from __future__ import annotations

import threading

import pytest
import torch

from protrain_kernels import AdamStates, adam, adam_reference, adam_scalars, split
from tests.kernels.states import check, copied

_INF, _NAN, _LARGE = float("inf"), float("nan"), 3.39e38  # the last is the largest bf16
_SPECIAL = [
    *(("grad", value) for value in (_NAN, _INF, -_INF, _LARGE, 3e19, -3e19)),
    *(("weight", value) for value in (_NAN, _INF, -_INF, _LARGE)),
    *(("exp_avg", value) for value in (_NAN, _INF, -_INF, _LARGE, -_LARGE)),
    *(("exp_avg_sq", value) for value in (_NAN, _INF, _LARGE, -1.0, -0.0)),
    *[("overflow", _LARGE)] * 4,  # variances that must be rounded down: beyond the largest bf16 is infinity
]


@pytest.mark.parametrize("out_of_place", [False, True], ids=["in place", "out of place"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_one_special_value_among_ordinary_ones(compiled: None, decoupled: bool, out_of_place: bool) -> None:
    """Moments in bf16: blocks without any, here every second one, go another way, with neighbours in pairs."""
    block = 512
    count = 4 * block * len(_SPECIAL)
    generator = torch.Generator().manual_seed(5)
    scalars = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.5, eps=1e-8, weight_decay=0.1, step=3, decoupled=decoupled)
    weight, remainder = split(torch.randn(count, generator=generator))
    exp_avg, grad = (torch.randn(count, generator=generator).bfloat16() for _ in range(2))
    exp_avg_sq = torch.rand(count, generator=generator).bfloat16()
    changed = {"grad": grad, "weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    scale = torch.tensor([1.0039])
    for at, (name, value) in enumerate(_SPECIAL):
        for side in range(2):  # of a pair
            place = 2 * (2 * at + side) * block + 17 + side
            if name == "overflow":
                exp_avg_sq[place], grad[place] = value, 1.8375e19  # its square, scaled, is just finite
                exp_avg[place] = 1e15 * place  # for other random bits
            else:
                changed[name][place] = value
    old = AdamStates(weight, remainder, exp_avg, exp_avg_sq)
    expected, found = copied(old), copied(old)
    adam_reference(*expected, grad, scalars, scale=scale)
    if out_of_place:
        adam(*old, grad, scalars, scale=scale, threads=2, out=found)
    else:
        adam(*found, grad, scalars, scale=scale, threads=2)
    check(found, expected)


def test_other_threads_run_during_a_call(compiled: None) -> None:
    """A library that held the GIL would let the main thread count to next to nothing."""
    scalars = adam_scalars(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, decoupled=True)
    weight, exp_avg, exp_avg_sq, grad = torch.zeros(4, 1 << 23)
    most = 0
    for _ in range(10):  # a busy machine may give the main thread no core for a while
        inside, count = threading.Event(), 0

        def call(inside: threading.Event = inside) -> None:
            inside.set()
            adam(weight, None, exp_avg, exp_avg_sq, grad, scalars, threads=1)

        thread = threading.Thread(target=call)
        thread.start()
        inside.wait()
        while thread.is_alive():
            count += 1
        most = max(most, count)
        if most > 2000:
            break
    assert most > 2000
