"""A block whose forward changes its modules: recomputed, it meets what the first run met, and nothing changes twice."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
    NONE,
    Spec,
    Trainer,
    adamw,
    assert_same,
    check_equal_to_plain,
    default_loss,
    seeded,
    states,
    wrap_under,
)
from tests.engine.plain_loop import prepare_plain
from tests.engine.profiles import shared_profile
from tests.engine.residual import batches

WIDTH = 16
SPECS = tuple(Spec("none", "least", (mode,)) for mode in (CKPT, CKPT_SWAP, NONE))
LARGE = 5000 * WIDTH  # elements of a table
HUGE = (1 << 22) + WIDTH  # elements: more than a buffer may have for a copy to be kept of it in case it is changed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.factor(x.detach())

    def factor(self, x: Tensor) -> Tensor:
        """What depends on the state of the module, which it changes."""
        raise NotImplementedError


class Averaging(Block):
    """An exponential average in a buffer that could be a table."""

    elements = LARGE
    starts = 0  # in which forward it is updated first
    hidden = False  # updates have no version
    average: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(self.elements // WIDTH, WIDTH))
        self.register_buffer("table", torch.full((LARGE,), 2.0))
        self.forwards = 0

    def factor(self, x: Tensor) -> Tensor:
        factor = self.average.mean(0) * self.table[0]
        if self.forwards >= self.starts:
            average = self.average.data if self.hidden else self.average
            average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.forwards += 1
        return factor


class Hidden(Averaging):
    hidden = True


class Late(Averaging):
    """As some quantisers do, which begin when training has settled."""

    starts = 2


class HugeLate(Late):
    elements = HUGE


class Lazy(Block):
    """Statistics that are made when they are first needed, and told by an attribute of the module."""

    ready = False
    average: Tensor

    def factor(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.register_buffer("average", torch.ones(WIDTH, device=x.device))
            self.ready = True
        factor = self.average.clone()
        self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return factor


class Replaced(Block):
    """A buffer that becomes another one, as tables do that grow."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(1, WIDTH))
        self.longest = 1

    def factor(self, x: Tensor) -> Tensor:
        factor = self.average.mean(0) / self.longest
        if self.longest < 3:
            self.longest += 1
            self.average = torch.cat([self.average, x.mean(0, keepdim=True)])
        return factor


class Counting(Block):
    calls = 0

    def factor(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tensor(0.5 if self.calls % 2 else 2.0)


class Dropping(Block):
    """Draws from the generators of Python and numpy and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def factor(self, x: Tensor) -> Tensor:
        return (
            torch.rand(WIDTH, generator=self.generator).to(x.device) * random.choice([0.5, 1.0, 2.0]) * np.random.rand()
        )


class LateDropping(Block):
    """Draws from a generator that is made when it is first needed, and another from time to time."""

    generator: torch.Generator | None = None
    calls = 0

    def factor(self, x: Tensor) -> Tensor:
        if self.generator is None or self.calls % 3 == 2:
            self.generator = torch.Generator().manual_seed(self.calls)
        self.calls += 1
        return torch.rand(WIDTH, generator=self.generator).to(x.device)


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def make(block: type[Block]) -> nn.Module:
    random.seed(0)
    np.random.seed(0)
    with seeded():
        return Model(block)


def profile(block: type[Block], device: torch.device) -> None:
    """Have the profile taken of another model, as when it is in the cache: forward changes more than it puts back."""
    model = make(block)
    shared_profile(model, batches()[0], optimizer=adamw(model), device=device, dtype=torch.float32)


@pytest.mark.parametrize("block", [Averaging, Hidden, Late, Lazy, Replaced, Counting, Dropping, LateDropping])
def test_what_forward_changes(block: type[Block], device: torch.device) -> None:
    profile(block, device)
    check_equal_to_plain(lambda: make(block), batches(4), device=device, specs=SPECS)


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_a_huge_buffer_that_is_first_changed_later(spec: Spec, device: torch.device) -> None:
    """The step in which that happens is refused; run once more it goes well."""

    def run(model: nn.Module, optimizer: Trainer, refused: Callable[[Tensor], None]) -> dict[str, Tensor]:
        for number, batch in enumerate(batches(4)):
            if number == HugeLate.starts:
                refused(default_loss(model, batch))
                optimizer.zero_grad()
            optimizer.backward(default_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        return states(model, optimizer)

    def refused(loss: Tensor) -> None:
        with pytest.raises(MisuseError, match="needs average as it was in forward"):
            loss.backward()

    profile(HugeLate, device)
    model = make(HugeLate)
    expected = run(*prepare_plain(model, adamw(model), device=device, dtype=torch.float32), lambda loss: None)
    model = make(HugeLate)
    assert_same(run(*wrap_under(spec, model, adamw(model), batches()[0], device=device), refused), expected)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_parameters_that_the_call_gives(spec: Spec, device: torch.device) -> None:
    """torch.func.functional_call: no parameter of the model's own is used, in no run of a block."""

    def given(model: nn.Module) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        made = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
        return {name: value.to(device).requires_grad_() for name, value in made.items()}

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        parameters = given(model)
        loss = torch.func.functional_call(model, parameters, batches()[0]).square().mean()
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    model = make(Counting)
    expected = gradients(prepare_plain(model, adamw(model), device=device, dtype=torch.float32)[0])
    model = make(Counting)
    wrapped, _ = wrap_under(spec, model, adamw(model), batches()[0], device=device)
    assert_same(gradients(wrapped), expected)


def test_given_parameters_that_change_meanwhile() -> None:
    model = make(Counting)
    wrapped, _ = wrap_under(SPECS[0], model, adamw(model), batches()[0], device=torch.device("cpu"))
    parameters = {name: torch.ones(p.shape).requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(wrapped, parameters, batches()[0]).square().mean()
    with torch.no_grad():
        parameters["blocks.2.linear.weight"].mul_(2.0)
    with pytest.raises(MisuseError, match=r"blocks\.2 needs weight as it was in forward"):
        loss.backward()
