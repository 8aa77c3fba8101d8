"""The last layer of a language model with its loss, forward and backward, in GPU memory.

What no implementation can do without are three products of rows x hidden x words, so their time is the roof. Plain
torch is left out where its logits do not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from bench.kernels.peers import close, compiled, installed
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import PRODUCTS
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import HEADS, head_shape
from protrain_kernels import linear_cross_entropy

LIGER, CUT, TORCH = "Liger", "cut-cross-entropy", "torch linear_cross_entropy"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
_ROWS_AT_ONCE = 4096  # of the products that are the roof, whose logits take as much memory as these have
_CHECKED_ROWS = 512  # whose logits the check has at once, in fp32
_ALIGNED_WORDS = 64  # the products are slow unless words are a multiple of a few


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight).float(), targets)


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, LIGER, CUT, TORCH])
@pytest.mark.parametrize("shape", HEADS)
def test_linear_cross_entropy(recorder: Recorder, shape: str, implementation: str) -> None:
    compute, version = _implementation(recorder, implementation)
    rows, width, words = head_shape(shape, whole=recorder.timed)
    generator = torch.Generator(recorder.device).manual_seed(0)
    hidden, weight = (torch.randn(count, width, generator=generator, device=recorder.device) for count in (rows, words))
    weight *= 3 * width**-0.5  # logits as of a model that is being trained
    hidden, weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    targets = torch.randint(words, (rows,), generator=generator, device=recorder.device)
    targets[::16] = -100

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = compute(hidden, weight, targets)
        return loss, torch.autograd.grad(loss, (hidden, weight))

    def check() -> str:
        loss, gradients = run()
        wanted_loss, *wanted = _in_fp32(hidden.detach(), weight.detach(), targets)
        # Others sum in 16 bits, or leave small probabilities out.
        loss_tolerance, tolerance = (1e-3, 1e-2) if implementation in (OURS, EAGER, COMPILED) else (5e-2, 5e-2)
        errors = [close("loss", loss.detach(), wanted_loss, loss_tolerance)]
        for name, found, exact in zip(("hidden", "weight"), gradients, wanted, strict=True):
            errors.append(close(f"gradient of {name}", found, exact, tolerance))
        return f"loss within {errors[0]:.0e}, gradients within {max(errors[1:]):.0e}"

    recorder.measure(
        operator="linear cross-entropy",
        shape=f"{shape}, {rows} x {width} x {words}",
        implementation=implementation,
        version=version,
        roof=PRODUCTS,
        bytes_moved=2 * (hidden.nbytes + weight.nbytes) + targets.nbytes,  # both are read, and their gradients written
        flops=6 * rows * width * words,
        run=run,
        check=check,
        limit=_products(hidden.detach(), weight.detach()) if recorder.timed else None,
    )


def _implementation(recorder: Recorder, name: str) -> tuple[Loss, str]:
    if name == OURS:
        return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets), ""
    if name in (EAGER, COMPILED):
        return compiled(recorder, _plain) if name == COMPILED else _plain, torch.__version__
    if name == TORCH:
        function = getattr(torch.nn.functional, "linear_cross_entropy", None)
        in_pieces = getattr(torch.nn, "LinearCrossEntropyOptions", None)
        if function is None or in_pieces is None:
            pytest.skip(f"torch {torch.__version__} has no linear_cross_entropy in pieces")
        options = in_pieces()  # as torch chooses
        return lambda hidden, weight, targets: function(hidden, weight, targets, options=options), torch.__version__
    if not recorder.timed:
        pytest.skip(f"{name} needs a GPU")
    if name == CUT:
        module, version = installed("cut-cross-entropy", "cut_cross_entropy")
        return module.linear_cross_entropy, version
    module, version = installed("liger-kernel", "liger_kernel.ops.fused_linear_cross_entropy")
    apply = module.LigerFusedLinearCrossEntropyFunction.apply

    def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        # Without bias, weights of words, smoothing and cap; the mean; gradients of the weight are summed in fp32.
        made = apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)
        loss: Tensor = made[0] if isinstance(made, tuple) else made
        return loss

    return liger, version


def _in_fp32(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the gradients of hidden states and weight, from logits in fp32 of a few rows at a time."""
    weight = weight.float().requires_grad_()
    hidden = hidden.float().requires_grad_()
    total, counted = torch.zeros((), device=hidden.device), (targets != -100).sum()
    for rows, own in zip(hidden.split(_CHECKED_ROWS), targets.split(_CHECKED_ROWS), strict=True):
        loss = cross_entropy(linear(rows, weight), own, reduction="sum") / counted
        loss.backward()
        total += loss.detach()
    assert hidden.grad is not None
    assert weight.grad is not None
    return total, hidden.grad, weight.grad


def _products(hidden: Tensor, weight: Tensor) -> Callable[[], None]:
    """Logits, and the gradients of hidden states and weight from them, as products alone.

    A vocabulary that products are slow with is widened, as an implementation may do.
    """
    words = -(-len(weight) // _ALIGNED_WORDS) * _ALIGNED_WORDS
    wide = torch.zeros(words, weight.shape[1], dtype=weight.dtype, device=weight.device)
    wide[: len(weight)] = weight
    for_hidden, for_weight = torch.empty_like(hidden), torch.empty_like(wide)
    logits = hidden.new_empty(min(len(hidden), _ROWS_AT_ONCE), words)

    def run() -> None:
        for rows, gradient in zip(hidden.split(_ROWS_AT_ONCE), for_hidden.split(_ROWS_AT_ONCE), strict=True):
            own = logits[: len(rows)]
            torch.mm(rows, wide.t(), out=own)
            torch.mm(own, wide, out=gradient)
            torch.mm(own.t(), rows, out=for_weight)

    return run
