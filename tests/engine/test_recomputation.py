"""What happens between forward and backward does not reach the recomputation of a checkpointed block."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.forward.module_state import SHARED, RandomState
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    SWAP,
    Batch,
    Loop,
    Spec,
    adamw,
    check_equal_to_plain,
    seeded,
    wrap_under,
)
from tests.engine.residual import batches, make

SPECS = tuple(Spec("none", "least", (mode,)) for mode in (CKPT, CKPT_SWAP, SWAP))
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)


class FromAll(Block):
    """A block that takes the outputs of all before it, in a list that grows."""

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.stack(features).sum(0)))


class FromContext(Block):
    """One that takes the last output out of a dictionary."""

    def forward(self, context: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.linear(context["last"])) + context["first"]


class Growing(nn.Module):
    def __init__(self, block: type[Block], width: int = 32) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(block(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        features = [self.enter(x)]
        context = {"first": features[0], "last": features[0]}
        for block in self.blocks:
            features.append(block(context if isinstance(block, FromContext) else features))
            context["last"] = features[-1]
        return self.leave(features[-1])


@pytest.mark.parametrize("block", [FromAll, FromContext])
def test_collections_that_grow_meanwhile(block: type[Block], device: torch.device) -> None:
    def build() -> nn.Module:
        with seeded():
            return Growing(block)

    check_equal_to_plain(build, batches(2), device=device, specs=SPECS)


def evaluated(model: nn.Module, batch: Batch) -> Tensor:
    """A loss in evaluation mode, whose backward comes in training mode."""
    model.eval()
    loss: Tensor = model(*batch).square().mean()
    model.train()
    return loss


def trained(model: nn.Module, batch: Batch) -> Tensor:
    """A loss in training mode, with dropout, whose backward comes in evaluation mode."""
    model.train()
    loss: Tensor = model(*batch).square().mean()
    model.eval()
    return loss


def frozen_since(model: nn.Module, batch: Batch) -> Tensor:
    """A loss with a graph for one block, whose backward comes when that is frozen and gets no gradient."""
    model.requires_grad_(True)
    loss: Tensor = model(*batch).square().mean()
    model.get_submodule("blocks.1").requires_grad_(False)
    return loss


def frozen_before(model: nn.Module, batch: Batch) -> Tensor:
    """A loss without gradients for one block, whose backward comes when that is to be trained again."""
    model.get_submodule("blocks.1").requires_grad_(False)
    loss: Tensor = model(*batch).square().mean()
    model.requires_grad_(True)
    return loss


@pytest.mark.parametrize("loss", [evaluated, trained, frozen_since, frozen_before])
def test_modes_that_are_switched_meanwhile(loss: Callable[[nn.Module, Batch], Tensor], device: torch.device) -> None:
    check_equal_to_plain(make, batches(2), loop=Loop(loss=loss), device=device, specs=SPECS)


class HoldsMemory(torch.autograd.Function):
    """Its node holds memory that is no saved tensor."""

    held: ClassVar[list[weakref.ref[Tensor]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.memory = torch.ones(8)
        HoldsMemory.held.append(weakref.ref(ctx.memory))
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class SavesView(torch.autograd.Function):
    """Saves a view of its input, as kernels for rows do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.view(-1))
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2.0


class Counts(torch.autograd.Function):
    """Counts in its backward, which begins with the second run, what nodes before it hold."""

    alive: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        Counts.alive.append(sum(reference() is not None for reference in HoldsMemory.held))
        return gradients[0]


class Holding(Block):
    def forward(self, x: Tensor) -> Tensor:
        held = HoldsMemory.apply(self.linear(x))
        return x + torch.tanh(Counts.apply(SavesView.apply(held)))


def test_nodes_of_the_second_run_hold_no_memory() -> None:
    """Only those of the first run have a backward."""
    model, batch = nn.Sequential(*(Holding(8) for _ in range(3))), (torch.randn(4, 8),)
    wrapped, _ = wrap_under(Spec("all", "least", (CKPT,)), model, adamw(model), batch, device=CPU)
    HoldsMemory.held.clear()
    Counts.alive.clear()
    loss = wrapped(*batch).square().mean()
    loss.backward()
    assert len(HoldsMemory.held) == 6, "each block ran twice"
    assert Counts.alive == [3, 3, 3], "only what the first runs hold"


def test_other_operations_are_named() -> None:
    class Wavering(nn.Module):
        wide = False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return torch.tanh(y.view(-1, 4) if self.wide else y).view(x.shape)

    model = nn.Sequential(*(Wavering() for _ in range(3)))
    batch = (torch.randn(4, 8),)
    wrapped, _ = wrap_under(Spec("none", "least", (CKPT,)), model, adamw(model), batch, device=CPU)
    loss = wrapped(*batch).square().mean()
    Wavering.wide = True
    with pytest.raises(MisuseError, match=r"of shape \(4, 8\) in forward and .* of shape \(8, 4\) in its place when"):
        loss.backward()


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("inside", [0, 1, 2, 3])
@pytest.mark.parametrize("between", [0, 1])  # forward and backward something else draws
def test_normal_numbers_of_numpy_are_drawn_again_from_either_half_of_a_pair(
    before: int, inside: int, between: int
) -> None:
    np.random.seed(5)
    expected = np.random.randn(before + inside + between + 2)
    np.random.seed(5)
    np.random.randn(before)
    state = RandomState(CPU, SHARED)
    first = np.random.randn(inside)
    np.random.randn(between)
    with state:
        assert np.array_equal(np.random.randn(inside), first)
    assert np.array_equal(np.random.randn(2), expected[-2:])


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64], ids=["usual", "replaced"])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("between", [0, 1])  # forward and backward something else draws
@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.gauss(0, 1),  # Python keeps the second number of a pair
        lambda: random.getrandbits(3),
        np.random.rand,
        np.random.randn,  # numpy keeps the second number of a pair
        lambda: np.random.permutation(9).tolist(),
    ],
    ids=["random", "gauss", "getrandbits", "rand", "randn", "permutation"],
)
def test_numbers_of_shared_generators_are_drawn_again(
    draw: Callable[[], object], between: int, before: int, kind: type[np.random.BitGenerator]
) -> None:
    numpy_random: Any = np.random  # not all of which is typed

    def begin() -> None:
        random.seed(5)
        numpy_random.set_bit_generator(kind(5))

    usual = numpy_random.get_bit_generator()
    try:
        begin()
        numbers = [draw() for _ in range(before + 3)]
        begin()
        RandomState(CPU, SHARED)  # the block before
        assert [draw() for _ in range(before)] == numbers[:before]
        state = RandomState(CPU, SHARED)
        assert draw() == numbers[before]
        assert [draw() for _ in range(between)] == numbers[before + 1 :][:between]
        with state:
            assert draw() == numbers[before]
        with state:
            assert [draw(), draw()] == numbers[before:][:2]
        assert draw() == numbers[before + 1 + between]
    finally:
        numpy_random.set_bit_generator(usual)


def test_a_state_that_the_script_sets_is_noticed() -> None:
    random.seed(5)
    np.random.seed(5)
    python, numpy = random.getstate(), np.random.get_state()
    RandomState(CPU, SHARED)
    expected = random.random(), np.random.rand()
    random.setstate(python)
    np.random.set_state(numpy)
    state = RandomState(CPU, SHARED)
    random.seed(6)
    np.random.seed(6)
    with state:
        assert (random.random(), np.random.rand()) == expected
