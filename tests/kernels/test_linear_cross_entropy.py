"""The cross-entropy of a linear layer is that of plain torch, piece by piece, with gradients, in the memory it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from protrain.profiler.memory_meter import StorageMeter
from protrain_kernels import linear_cross_entropy
from protrain_kernels.linear_cross_entropy import piece_rows

SEVERAL_PIECES = 2500  # rows
Gradients = tuple[Tensor, list[Tensor | None]]  # the loss and what each given tensor has as its gradient


def _given(
    rows: int = 50,
    words: int = 101,
    *,
    bias: bool = True,
    hidden: int = 24,
    dtype: Any = torch.float32,
    device: Any = None,
) -> tuple[list[Tensor], Tensor]:
    """(hidden states, weight and maybe bias, all of which want gradients; targets, every fifth of which is ignored)."""
    generator = torch.Generator().manual_seed(rows + words)
    shapes = [(rows, hidden), (words, hidden), (words,)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes[: 2 + bias]]
    targets = torch.randint(words, (rows,), generator=generator)
    targets[::5] = -100
    return [tensor.requires_grad_() for tensor in tensors], targets.to(device)


def _ours(tensors: list[Tensor], targets: Tensor, **options: Any) -> Tensor:
    hidden, weight, *bias = tensors
    return linear_cross_entropy(hidden, weight, targets, bias=bias[0] if bias else None, **options)


def _plain(
    tensors: list[Tensor], targets: Tensor, *, divisor: Any = None, ignore_index: int = -100, softcap: float = 0.0
) -> Tensor:
    """As a model computes it by torch's functions: logits in the type of the tensors, and their cross-entropy in fp32.

    Of tensors in fp64 all of it is in fp64.
    """
    logits = linear(*tensors)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    loss = cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return loss / ((targets != ignore_index).sum() if divisor is None else torch.as_tensor(divisor).reshape(()))


def _gradients(compute: Callable[..., Tensor], tensors: list[Tensor], targets: Tensor, **options: Any) -> Gradients:
    """What ``compute`` makes of copies in their own memory."""
    copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    loss = compute(copies, targets, **options)
    loss.backward()
    return loss.detach(), [copy.grad for copy in copies]


def _in_fp64(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]


def _error(found: Tensor | None, wanted: Tensor | None) -> float:
    """The relative error of a tensor as a whole."""
    assert found is not None
    assert wanted is not None
    assert found.shape == wanted.shape
    return float(((found.double() - wanted.double()).norm() / wanted.double().norm()).detach())


def _compare(tensors: list[Tensor], targets: Tensor, **options: Any) -> None:
    """AssertionError unless loss and gradients in fp32 are those of torch in fp64."""
    loss, gradients = _gradients(_ours, tensors, targets, **options)
    wanted_loss, wanted = _gradients(_plain, _in_fp64(tensors), targets, **options)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert _error(loss, wanted_loss) < 1e-6
    for tensor, found, exact in zip(tensors, gradients, wanted, strict=True):
        assert (found is not None) == tensor.requires_grad
        if found is not None:
            assert found.dtype == tensor.dtype
            assert _error(found, exact) < 2e-6


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("words", [3, 96, 101, 200])
@pytest.mark.parametrize("rows", [1, 50, SEVERAL_PIECES])
def test_loss_and_gradients_are_those_of_torch_in_fp64(rows: int, words: int, bias: bool) -> None:
    tensors, targets = _given(rows, words, bias=bias)
    targets[0] = words - 1
    _compare(tensors, targets)


OPTIONS: list[dict[str, Any]] = [
    {"softcap": 5.0},
    {"ignore_index": 7},
    *({"divisor": divisor} for divisor in (3, 0.5, torch.tensor(17), torch.tensor(2.5), torch.tensor([17.0]))),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [50, SEVERAL_PIECES])
def test_options(rows: int, options: dict[str, Any]) -> None:
    tensors, targets = _given(rows)
    targets[::5] = options.get("ignore_index", -100)
    _compare(tensors, targets, **options)


@pytest.mark.parametrize("rows", [50, 0])
def test_where_no_target_counts_all_is_as_in_torch(rows: int) -> None:
    tensors, _ = _given(rows)
    targets = torch.full((rows,), -100)
    loss, gradients = _gradients(_ours, tensors, targets)
    wanted_loss, wanted = _gradients(lambda given, aims: cross_entropy(linear(*given), aims), tensors, targets)
    torch.testing.assert_close((loss, *gradients), (wanted_loss, *wanted), rtol=0, atol=0, equal_nan=True)
    assert loss.isnan()
    assert all(gradient is not None and bool((gradient == 0).all()) for gradient in gradients)


def test_a_target_that_is_no_word_makes_the_loss_nan() -> None:
    tensors, targets = _given()
    targets[3] = 101  # just behind the words, in the zeros with which they are widened
    loss, (hidden, *_) = _gradients(_ours, tensors, targets)
    assert loss.isnan()
    assert hidden is not None
    assert hidden.isnan().any(dim=1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 2], [1, 2], [0, 1]], ids=str)
def test_what_is_frozen_has_no_gradient(frozen: list[int]) -> None:
    tensors, targets = _given(SEVERAL_PIECES)
    for index in frozen:
        tensors[index].requires_grad_(False)
    _compare(tensors, targets, softcap=20.0)


def test_without_gradients_there_is_the_loss_alone() -> None:
    tensors, targets = _given(SEVERAL_PIECES)
    with torch.no_grad():
        loss = _ours(tensors, targets)
    assert not loss.requires_grad
    assert _error(loss, _plain(_in_fp64(tensors), targets)) < 1e-6
    assert not _ours([tensor.detach() for tensor in tensors], targets).requires_grad


def test_autocast_casts_as_for_a_linear_layer() -> None:
    tensors, targets = _given(SEVERAL_PIECES)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    wanted_loss, wanted = _gradients(_ours, narrow, targets)
    loss, gradients = _gradients(torch.autocast("cpu", torch.bfloat16)(_ours), tensors, targets)
    assert torch.equal(loss, wanted_loss)
    for found, expected in zip(gradients, wanted, strict=True):
        assert found is not None
        assert expected is not None
        assert found.dtype == torch.float32
        assert torch.equal(found, expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_second_backward_gives_equal_bits(dtype: torch.dtype) -> None:
    tensors, targets = _given(SEVERAL_PIECES, dtype=dtype)
    loss = _ours(tensors, targets)
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert first[1].data_ptr() != second[1].data_ptr()  # the first may have become a ``grad`` that is added to


def _errors_in_16_bits(
    rows: int, hidden: int, words: int, *, loss_scale: float = 1.0, **kind: Any
) -> tuple[list[float], list[float]]:
    """Relative errors of the gradients of hidden states and weight: (of ours, of plain torch)."""

    def errors(compute: Callable[..., Tensor]) -> list[float]:
        _, found = _gradients(lambda *given: loss_scale * compute(*given), tensors, targets)
        return [_error(*pair) for pair in zip(found, exact, strict=True)]

    tensors, targets = _given(rows, words, hidden=hidden, bias=False, **kind)
    with torch.no_grad():
        tensors[1] *= 3 * hidden**-0.5  # logits as of a model that is being trained
    _, exact = _gradients(lambda *given: loss_scale * _plain(*given), _in_fp64(tensors), targets)
    return errors(_ours), errors(_plain)


@pytest.mark.parametrize(
    ("dtype", "words", "most", "ratio", "loss_scale"),
    [
        (torch.bfloat16, 501, 0.01, 1.001, 1.0),
        (torch.float16, 2000, 0.001, 1.2, 65536.0),  # before which gradients do not vanish
    ],
    ids=str,
)
def test_gradients_in_16_bits_are_as_exact_as_those_of_torch(
    dtype: torch.dtype, words: int, most: float, ratio: float, loss_scale: float
) -> None:
    """Plain torch has logits in 16 bits and their cross-entropy in fp32 too, and sums over all rows in one product."""
    ours, plain = _errors_in_16_bits(SEVERAL_PIECES, 64, words, dtype=dtype, loss_scale=loss_scale)
    assert max(plain) < most
    assert all(own <= ratio * other for own, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("trained", [True, False], ids=["trained weight", "frozen weight"])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 300), (torch.bfloat16, 5000), (torch.float16, 5000)])
def test_the_memory_is_what_the_module_says(dtype: torch.dtype, rows: int, trained: bool) -> None:
    hidden, words = 64, 1000
    tensors, targets = _given(rows, words, bias=False, hidden=hidden, dtype=dtype, device="meta")
    tensors[1].requires_grad_(trained)
    piece = 2 * piece_rows(rows, hidden, trained=trained) * words
    kept = 2 * rows * hidden + (4 * words * hidden if trained else 0)
    returned = 2 * rows * hidden + (2 * words * hidden if trained else 0)
    small = 4 * rows + rows + 64  # the losses, which targets count, and a few numbers
    with StorageMeter() as meter:
        meter.ignore((*tensors, targets))
        loss = _ours(tensors, targets)
        assert kept + piece <= meter.peak_bytes <= kept + piece + small
        assert kept <= meter.alive_bytes <= kept + small
        meter.reset_peak()
        loss.backward()
        assert kept + returned <= meter.peak_bytes <= kept + returned + small
    with torch.no_grad(), StorageMeter() as meter:
        meter.ignore((*tensors, targets))
        _ours(tensors, targets)
        assert meter.peak_bytes <= 2 * piece_rows(rows, hidden, trained=False) * words + small


def test_pieces() -> None:
    """Figures, so that a change shows: other pieces are other bits of the gradients of a weight."""
    by_rows = {0: 0, 1: 1, 127: 127, 129: 129, 2048: 2048, 2049: 1152, 16384: 2048}
    assert {rows: piece_rows(rows, 1024, trained=True) for rows in by_rows} == by_rows
    by_hidden = {64: 2048, 2048: 2048, 3584: 2816, 4096: 4096, 9000: 8192}
    assert {hidden: piece_rows(8192, hidden, trained=True) for hidden in by_hidden} == by_hidden
    frozen = {1: 1, 1024: 1024, 1025: 640, 3000: 1024, 16384: 1024}
    assert {rows: piece_rows(rows, 4096, trained=False) for rows in frozen} == frozen


def test_wrong_targets_are_named() -> None:
    tensors, targets = _given()
    for wrong, message in (
        (targets[1:], r"hidden states \[50, 24\] need as many targets of int64, not \[49\]"),
        (targets.int(), r"not \[50\] of torch\.int32"),
        (targets.to("meta"), "targets are on meta and hidden states on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            _ours(tensors, wrong)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Call it, and from then on to wait for the device is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("divisor", [None, 7.0, torch.tensor(7.0)], ids=repr)
@pytest.mark.parametrize("words", [1000, 1001])
def test_nothing_waits_for_the_device(no_waiting: Callable[[], None], words: int, divisor: Any) -> None:
    tensors, targets = _given(SEVERAL_PIECES, words, dtype=torch.bfloat16, device="cuda")
    _ours(tensors, targets, divisor=divisor).backward()  # compiles
    no_waiting()
    with pytest.raises(RuntimeError, match="synchronizing"):  # else this test could not fail
        targets.sum().item()
    _ours(tensors, targets, divisor=divisor).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("words", [32000, 50257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_is_as_exact_as_torch_on_it(dtype: torch.dtype, words: int) -> None:
    # A GPU adds the products of a piece in another order than those of all rows, in fp32 in either case.
    ours, plain = _errors_in_16_bits(2048, 512, words, dtype=dtype, device="cuda")
    assert all(own <= 1.05 * other for own, other in zip(ours, plain, strict=True))


@pytest.mark.gpu
def test_targets_that_lie_apart_are_read_where_they_are() -> None:
    tensors, targets = _given(dtype=torch.bfloat16, device="cuda")
    apart = torch.full((len(targets), 3), -100, device="cuda")
    apart[:, 1] = targets
    (loss, gradients), (wanted, exact) = (_gradients(_ours, tensors, each) for each in (apart[:, 1], targets))
    assert torch.equal(loss, wanted)
    torch.testing.assert_close(gradients, exact, rtol=0, atol=0)
