"""A block's tensors and their places in a chunk, for the benchmarks of flatten and unflatten."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernels.shapes import tensor_shapes
from protrain_kernels import padded, tiles


@dataclass(frozen=True)
class Places:
    """Tensors of one model's block and a chunk that has room for them.

    Attributes:
        tensors: bfloat16, as gradients are, or the weights that a chunk is to be read into.
        chunk: 1-d, each tensor at its offset and padded to 128 elements.
        offsets: of the tensors, in elements.
        starts: of each tensor's partial sums of squares.
        partials: float32.
    """

    tensors: list[Tensor]
    chunk: Tensor
    offsets: list[int]
    starts: list[int]
    partials: Tensor

    @classmethod
    def of(cls, name: str, chunk_dtype: torch.dtype, device: torch.device, *, whole: bool) -> Places:
        """The tensors that ``tensor_shapes`` names, with values as of gradients, and an empty chunk."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = tensor_shapes(name, whole=whole)
        tensors = [
            torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(1e-3) for shape in shapes
        ]
        numels = [math.prod(shape) for shape in shapes]
        ends, starts = [0], [0]
        for numel in numels:
            ends.append(ends[-1] + padded(numel))
            starts.append(starts[-1] + tiles(numel))
        return cls(
            tensors,
            torch.zeros(ends[-1], dtype=chunk_dtype, device=device),
            ends[:-1],
            starts[:-1],
            torch.zeros(starts[-1], device=device),
        )

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors)

    def views(self) -> list[Tensor]:
        """The places as views of the chunk, each shaped as its tensor."""
        return views_of(self.chunk, self.tensors, self.offsets)


def views_of(chunk: Tensor, tensors: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """The tensors' places as views of ``chunk``. Compiled functions make them inside: views passed in would alias."""
    pairs = zip(tensors, offsets, strict=True)
    return [chunk[offset : offset + tensor.numel()].view(tensor.shape) for tensor, offset in pairs]
