"""Whole scripts of kinds that people train by on several ranks, each with the bits of the plain loop on as many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.nn import functional

from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.pool import on_ranks
from tests.engine.harness import FEW_PLANS, PLANS, Spec, wrap_under
from tests.engine.plain_loop import prepare_plain

WORDS, WIDTH, ROWS = 32, 16, 4


class Model(nn.Module):
    """A small model of language."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class Loop:
    """A model with its optimizer, of ProTrain or of the plain loop, on one of two ranks."""

    def __init__(self, model: nn.Module, optimizer: Any, rank: int) -> None:
        self.model, self.optimizer, self.rank = model, optimizer, rank
        self.told: list[float] = []  # losses and whatever else the script decides by

    def ids(self, step: int, length: int = 6) -> Tensor:
        """The batch of this rank."""
        return torch.randint(0, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(10 * step + self.rank))

    def loss(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(ids).flatten(0, 1), ids.roll(1).flatten())

    def step(self, loss: Tensor) -> None:
        loss.backward()
        if not isinstance(self.optimizer, ProTrainOptimizer):
            for total in self.optimizer.sums.values():  # of two ranks, whose sum has one order
                dist.all_reduce(total)
                total.mul_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.told.append(loss.item())


def contrast(loop: Loop) -> None:
    """Embeddings of all ranks are compared, and their gradients go back to the ranks that computed them."""
    for step in range(3):
        ids = loop.ids(step)
        pooled = functional.normalize(loop.model(torch.cat((ids, ids.roll(1, 0)))).mean(1), dim=-1)
        first, second = (
            torch.cat(torch.distributed.nn.functional.all_gather(half.contiguous())) for half in pooled.chunk(2)
        )
        loop.step(functional.cross_entropy(5 * first @ second.T, torch.arange(2 * ROWS)))


def grow(loop: Loop) -> None:
    """Rows become longer than the planned ones, on one rank more than on the other."""
    for step, length in enumerate((2, 6, 8, 13)):
        loop.step(loop.loss(loop.ids(step, length + step * loop.rank)))


def freeze(loop: Loop) -> None:
    """The first layers are frozen for a while."""
    early = [*loop.model.get_submodule("embedding").parameters(), *loop.model.get_submodule("blocks.0").parameters()]
    for step in range(6):
        if step in (2, 4):
            for parameter in early:
                parameter.requires_grad = step == 4
        loop.step(loop.loss(loop.ids(step)))


def decide(loop: Loop) -> None:
    """The learning rate follows a metric of all ranks, and rank 0 alone decides when to stop."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, factor=0.5, patience=0)
    stop = torch.zeros(1)
    for epoch in range(8):
        for step in range(2):
            loop.step(loop.loss(loop.ids(step)))
        metric = _validated(loop)
        scheduler.step(metric)
        loop.told += [metric, loop.optimizer.param_groups[0]["lr"]]
        if loop.rank == 0:
            stop += epoch == 2
        dist.broadcast(stop, 0)
        if stop:
            break


def skip(loop: Loop) -> None:
    """A loss that is not finite on one rank is skipped by both."""
    for step in range(4):
        loss = loop.loss(loop.ids(step))
        if step == 2 and loop.rank == 1:
            loss = loss * float("nan")
        bad = (~loss.isfinite()).float()
        dist.all_reduce(bad)
        if bad:
            del loss
            continue
        loop.step(loss)


def _validated(loop: Loop) -> float:
    with torch.no_grad():
        metric = loop.loss(loop.ids(99))
    dist.all_reduce(metric)
    return metric.item()


def train(rank: int, script: Callable[[Loop], None], spec: Spec) -> list[str]:
    """Where ``script`` differs from the plain loop."""
    loops = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = Model()
        groups: list[dict[str, Any]] = [
            {"params": [*model.embedding.parameters(), *model.blocks.parameters()]},
            {"params": model.head.parameters(), "lr": 3e-2},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        example = torch.zeros(ROWS, 6, dtype=torch.int64)
        cpu = torch.device("cpu")
        trained: Any
        if wraps:
            trained = wrap_under(spec, model, optimizer, (example,), device=cpu, world_size=2)
        else:
            trained = prepare_plain(model, optimizer, device=cpu, dtype=torch.float32)
        model, optimizer = trained
        loop = Loop(model, optimizer, rank)
        script(loop)
        loops.append(loop)
    plain, wrapped = loops
    states = wrapped.model.state_dict()
    differing = [name for name, value in plain.model.state_dict().items() if not torch.equal(value, states[name])]
    return differing + ([] if plain.told == wrapped.told else [f"{wrapped.told}, not {plain.told}"])


@pytest.mark.parametrize("spec", [PLANS[0], FEW_PLANS[0]], ids=str)
@pytest.mark.parametrize("script", [contrast, grow, freeze, decide, skip])
def test_a_script(script: Callable[[Loop], None], spec: Spec) -> None:
    assert on_ranks(2, train, script, spec) == [[], []]
