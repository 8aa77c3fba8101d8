"""The gradients of W ranks into one shard's mean, with squares for the norm in the same pass.

The shard is the second of W equal ones of a model's block, so it cuts parameters at both ends. What moves the pieces
between ranks belongs to the collective and isn't timed. A gradient that is not finite makes its squares, or its norm,
not finite, so both are a finite check as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.kernels.peers import close, compiled, same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import DEVICE
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import MODELS, QUICK, SMALL_TENSORS, chunk_elements, tensor_shapes
from protrain_kernels import TILE, Slice, fold, fold_reference, padded, tiles
from protrain_kernels.fold import launch_fold, table_for

SUM = "torch.sum + vector_norm"
RANKS = (2, 8)


@dataclass(frozen=True)
class Shard:
    """What arrives for one rank's shard of a block, and what it is folded into."""

    pieces: Tensor  # [ranks, n] bfloat16, zero in the padding
    slices: list[Slice]
    gradient: Tensor | None  # [n] bfloat16; None where values are summed for a later micro-batch
    accumulator: Tensor | None  # [n] float32; None where the gradient is finished at once
    partials: Tensor | None

    @classmethod
    def of(cls, name: str, ranks: int, device: torch.device, *, whole: bool, accumulate: bool) -> Shard:
        """The second shard of the block that ``name`` stands for, with values as of gradients."""
        begin = padded(-(-chunk_elements(name, whole=whole) // ranks))
        end, place, partial, slices = 2 * begin, 0, 0, []
        for shape in tensor_shapes(name, whole=whole):
            numel = math.prod(shape)
            first, stop = max(0, begin - place), min(numel, end - place)
            if first < stop:
                offset = place + first - begin
                slices.append(
                    Slice(
                        offset=offset,
                        numel=stop - first,
                        first=first,
                        parameter_numel=numel,
                        partial_offset=partial,
                    )
                )
            place += padded(numel)
            partial += tiles(numel)
        generator = torch.Generator(device).manual_seed(0)
        pieces = torch.zeros(ranks, begin, dtype=torch.bfloat16, device=device)
        for part in slices:
            pieces[:, part.offset : part.offset + part.numel].normal_(std=1e-3, generator=generator)
        outputs = [torch.zeros(begin, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32)]
        gradient, accumulator = (None, outputs[1]) if accumulate else (outputs[0], None)
        return cls(pieces, slices, gradient, accumulator, None if accumulate else torch.zeros(partial, device=device))

    @property
    def ranks(self) -> int:
        return self.pieces.shape[0]

    @property
    def elements(self) -> int:
        """Of all slices."""
        return sum(part.numel for part in self.slices)


def _plain(pieces: Tensor, gradient: Tensor) -> Tensor:
    """What one writes in plain torch. Returns the norm of what the gradient holds."""
    total = pieces[0].float()
    for piece in pieces[1:]:
        total = total + piece
    gradient.copy_(total * (1 / len(pieces)))
    return torch.linalg.vector_norm(gradient, dtype=torch.float32)


def _sum(pieces: Tensor, gradient: Tensor) -> Tensor:
    """One call for all ranks. Returns the norm of what the gradient holds."""
    gradient.copy_(torch.sum(pieces, 0, dtype=torch.float32).mul_(1 / len(pieces)))
    return torch.linalg.vector_norm(gradient, dtype=torch.float32)


def _add(pieces: Tensor, accumulator: Tensor) -> None:
    for piece in pieces:
        accumulator.add_(piece)


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, SUM])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [*MODELS, SMALL_TENSORS])
def test_fold(recorder: Recorder, shape: str, ranks: int, implementation: str) -> None:
    shard = Shard.of(shape, ranks, recorder.device, whole=recorder.timed, accumulate=False)
    gradient, partials = shard.gradient, shard.partials
    assert gradient is not None
    assert partials is not None
    run = _implementation(recorder, shard, implementation)

    def check() -> str:
        wanted, squares = torch.full_like(gradient, torch.nan), torch.full_like(partials, torch.nan)
        fold_reference(shard.pieces, shard.slices, gradient=wanted, factor=1 / ranks, partials=squares)
        gradient.fill_(torch.nan)  # what nobody writes must not look right
        partials.fill_(torch.nan)
        norm = run()
        if norm is None:
            same_bits("gradient", gradient, wanted)
            same_bits("partials", partials, squares)
        else:
            own = ~wanted.isnan()  # the end of the last shard is nobody's
            close("gradient", gradient[own], wanted[own], 4e-3)
            close("norm", norm, wanted[own].double().norm(), 1e-4)
        _check_infinity(shard, run)
        return "bits equal" if norm is None else "gradient within 4e-03, norm within 1e-04"

    _measure(recorder, shard, shape, implementation, run, check)


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", QUICK)
def test_fold_accumulates(recorder: Recorder, shape: str, ranks: int, implementation: str) -> None:
    shard = Shard.of(shape, ranks, recorder.device, whole=recorder.timed, accumulate=True)
    accumulator = shard.accumulator
    assert accumulator is not None
    run = _implementation(recorder, shard, implementation)

    def check() -> str:
        accumulator.fill_(1e-3)
        wanted = accumulator.clone()
        fold_reference(shard.pieces, shard.slices, gradient=None, accumulator=wanted, factor=1.0)
        run()
        for part in shard.slices:  # with the padding where it is ours, which a peer leaves as it is
            own = slice(part.offset, part.offset + (part.padded if implementation == OURS else part.numel))
            same_bits("accumulator", accumulator[own], wanted[own])
        accumulator.zero_()
        return "bits equal"

    _measure(recorder, shard, shape, implementation, run, check)


def _measure(
    recorder: Recorder,
    shard: Shard,
    shape: str,
    implementation: str,
    run: Callable[[], Tensor | None],
    check: Callable[[], str],
) -> None:
    accumulate = shard.accumulator is not None
    written = sum(len(part.whole_tiles) for part in shard.slices) if shard.partials is not None else 0
    recorder.measure(
        operator=f"fold of {shard.ranks} ranks, {'fp32 accumulation' if accumulate else 'norm'}",
        shape=shape if shape == SMALL_TENSORS else f"{shape} block",
        implementation=implementation,
        roof=DEVICE,
        # Each rank's piece is read, and the gradient written, or the fp32 sum read and written.
        bytes_moved=(2 * shard.ranks + (8 if accumulate else 2)) * shard.elements + 4 * written,
        flops=(shard.ranks if accumulate else shard.ranks + 2) * shard.elements,
        run=run,
        check=check,
    )


def _check_infinity(shard: Shard, run: Callable[[], Tensor | None]) -> None:
    """An infinity in a whole tile of the last rank's piece must be seen, where the shard has a whole tile."""
    part = max(shard.slices, key=lambda part: len(part.whole_tiles))
    if not part.whole_tiles:  # so are some shapes that are shrunk for want of a GPU
        return
    last = shard.pieces[-1, part.offset : part.offset + part.numel]
    place = part.whole_tiles.start * TILE - part.first
    kept = last[place].clone()
    last[place] = torch.inf
    norm = run()
    last[place] = kept
    seen = shard.partials if norm is None else norm
    assert seen is not None
    assert seen.isinf().any(), "an infinity in the last rank's gradient isn't seen"
    run()


def _implementation(recorder: Recorder, shard: Shard, name: str) -> Callable[[], Tensor | None]:
    if name == OURS:
        targets = {"gradient": shard.gradient, "accumulator": shard.accumulator, "partials": shard.partials}
        factor = 1 / shard.ranks
        if recorder.device.type == "cuda":
            return lambda: fold(shard.pieces, shard.slices, **targets, factor=factor)
        table = table_for(tuple(shard.slices), recorder.device)  # fold would run torch on the CPU
        return lambda: launch_fold(table, shard.pieces, **targets, factor=factor)
    accumulator, gradient = shard.accumulator, shard.gradient
    if accumulator is not None:
        add = compiled(recorder, _add) if name == COMPILED else _add
        return lambda: add(shard.pieces, accumulator)
    assert gradient is not None
    plain = _sum if name == SUM else compiled(recorder, _plain) if name == COMPILED else _plain
    return lambda: plain(shard.pieces, gradient)
