"""Models with collectives of their own in forward and backward, such as SyncBatchNorm, which refuses tensors on a CPU.

A block that is recomputed begins those of its forward again, so all ranks must recompute it, or none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.pool import on_ranks
from tests.engine.harness import FEW_PLANS, Spec, wrap_under
from tests.engine.plain_loop import prepare_plain

ROWS, LARGE = 16, 160
STEPS = 3


class _Normalised(torch.autograd.Function):
    """What SyncBatchNorm does: statistics over all ranks in forward, and those of the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, running: Tensor) -> Tensor:
        sums = torch.stack((x.sum(0), x.square().sum(0), torch.full_like(x[0], len(x))))
        dist.all_reduce(sums)
        mean = sums[0] / sums[2]
        scale = (sums[1] / sums[2] - mean.square() + 1e-5).rsqrt()
        running.lerp_(torch.stack((mean, scale)), 0.1)
        normal = (x - mean) * scale
        ctx.save_for_backward(normal, weight, scale, sums[2])
        return normal * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normal, weight, scale, count = ctx.saved_tensors
        inner = gradient * weight
        sums = torch.stack((inner.sum(0), (inner * normal).sum(0), torch.zeros_like(scale)))
        dist.all_reduce(sums)  # of the size of that in forward: to confuse them would raise no error
        return scale * (inner - (sums[0] + normal * sums[1]) / count), (gradient * normal).sum(0), None


class Norm(nn.Module):
    """A normalisation over the batches of all ranks."""

    running: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("running", torch.zeros(2, width))

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = _Normalised.apply(x, self.weight, self.running)
        return normal


class Block(nn.Module):
    """A layer with such a normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(width, width, bias=False), Norm(width)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return x + y


class Model(nn.Module):
    """Blocks with a loss, after a normalisation outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _batch(rank: int, step: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def _made() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _trained(model: nn.Module, optimizer: Any, batches: list[Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and what the model has afterwards."""
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        if not isinstance(optimizer, ProTrainOptimizer):
            for total in optimizer.sums.values():  # of two ranks, whose sum has one order
                dist.all_reduce(total)
                total.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def _differing(rank: int, batches: list[Tensor], model: nn.Module, optimizer: ProTrainOptimizer) -> list[str]:
    """Where a training differs from the plain loop on two ranks."""
    plain = prepare_plain(*_made(), device=torch.device("cpu"), dtype=torch.float32)
    losses, states = _trained(*plain, batches)
    found, ends = _trained(model, optimizer, batches)
    return [name for name, value in states.items() if not torch.equal(value, ends[name])] + (
        [] if found == losses else [f"{found}, not {losses}"]
    )


def train_under(rank: int, specs: tuple[Spec, ...]) -> dict[str, list[str]]:
    """Where trainings under these plans differ from the plain loop."""
    batches = [_batch(rank, step) for step in range(STEPS)]
    cpu, example = torch.device("cpu"), (batches[0],)
    return {
        str(spec): _differing(rank, batches, *wrap_under(spec, *_made(), example, device=cpu, world_size=2))
        for spec in specs
    }


def test_blocks_with_collectives_under_every_plan() -> None:
    for differing in on_ranks(2, train_under, FEW_PLANS):
        assert differing == {str(spec): [] for spec in FEW_PLANS}
