"""Small models that do in their forwards what a second run of a block could get wrong, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.harness import Batch

WIDTH = 32


class Plain(nn.Module):
    """The block that the others change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class _LooksTwice(torch.autograd.Function):
    """Its backward asks for its saved tensors twice, as that of a fused kernel that calls two others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        inner = gradients[0] * (1 - torch.tanh(x @ weight.t()).square())
        x, weight = ctx.saved_tensors
        return inner @ weight, inner.t() @ x


class LooksTwice(Plain):
    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + _LooksTwice.apply(self.norm(x), self.linear.weight)


class Sparse(Plain):
    """A layer of a graph, with the matrix of its edges as a sparse tensor."""

    layout = torch.sparse_coo

    def forward(self, x: Tensor, edges: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(edges % len(x), scales, (len(x), len(x))).coalesce()
        if self.layout is not torch.sparse_coo:
            matrix = matrix.to_sparse(layout=self.layout)
        return x + torch.tanh(self.linear(matrix @ self.norm(x)))


class SparseRows(Sparse):
    layout = torch.sparse_csr


class SparseWeight(Plain):
    """Adds a sparse matrix to its weight, whose values are a parameter."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        places = torch.arange(WIDTH, device=x.device).expand(2, -1)
        change = torch.sparse_coo_tensor(places, self.norm.weight, (WIDTH, WIDTH))
        return x + torch.tanh(F.linear(x, self.linear.weight + change, self.linear.bias))


class Nested(Plain):
    """Attention over sequences of several lengths, which lie one after the other."""

    def offsets(self, offsets: Tensor) -> Tensor:
        return offsets

    def forward(self, x: Tensor, edges: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        offsets = self.offsets(offsets)
        heads = self.linear(self.norm(x)).unflatten(-1, (4, -1))
        packed = torch.nested.nested_tensor_from_jagged(heads, offsets).transpose(1, 2)
        attended = F.scaled_dot_product_attention(packed, packed, packed).transpose(1, 2)
        return x + attended.values().flatten(-2)


class OwnOffsets(Nested):
    """Makes the offsets anew in every run, if it is told to."""

    makes = True

    def offsets(self, offsets: Tensor) -> Tensor:
        return offsets * 1 if self.makes else offsets


class Model(nn.Module):
    """Four blocks, and perhaps a term of the loss that is made of their weights, which it takes as ``view`` says."""

    def __init__(self, block: type[Plain] = Plain, view: str = "") -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 3)
        self.view = view

    def forward(self, x: Tensor, edges: Tensor, scales: Tensor) -> Tensor:
        x, offsets = self.enter(x), edges[0]
        for block in self.blocks:
            x = block(x, edges, scales, offsets)
        loss = self.leave(x).square().mean()
        if self.view:
            for block in self.blocks:
                weight = block.get_submodule("linear").get_parameter("weight")
                loss = loss + 0.01 * (getattr(weight, self.view) @ weight).square().mean()
        return loss


class SparseOutside(Model):
    """Makes one sparse matrix for all blocks, and multiplies with it between them."""

    def forward(self, x: Tensor, edges: Tensor, scales: Tensor) -> Tensor:
        x = self.enter(x)
        matrix = torch.sparse_coo_tensor(edges % len(x), scales, (len(x), len(x))).coalesce()
        for block in self.blocks:
            x = block(matrix @ x)
        return self.leave(x).square().mean()


def batches(count: int = 3) -> list[Batch]:
    """Rows, the edges of a graph between them, the first line of which serves as offsets, too, and their scales."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 2, 3, 5, 8, 11, 13], [1, 0, 4, 6, 9, 12, 2]])
    return [(torch.randn(13, 8, generator=generator), edges, torch.rand(7, generator=generator)) for _ in range(count)]
