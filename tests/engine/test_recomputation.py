"""A recomputed block meets what its first run met, whatever it changes itself, and whatever happens until backward."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from tests.engine.harness import Batch, Loop, Spec, adamw, check_equal_to_plain, wrap_under
from tests.engine.profiles import shared_profile
from tests.engine.residual import Model, batches, make

WIDTH = 16
MODES = "cisn"
SPECS = tuple(Spec("none", "least", mode, attention=mode == "i") for mode in MODES)

# -- what forward changes ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.factor(x.detach())

    def factor(self, x: Tensor) -> Tensor:
        """What depends on the state of the module, which it changes."""
        raise NotImplementedError


class Averaging(Block):
    """An exponential average in a buffer that could be a table."""

    rows = 5000
    starts = 0  # in which forward it is updated first
    hidden = False  # updates have no version
    average: Tensor
    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("average", torch.ones(self.rows, width))
        self.register_buffer("table", torch.full((5000,), 2.0))
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
    rows = (1 << 18) + 1  # of 16 numbers: more than a buffer may have for a copy to be kept of it in case it is changed


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

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("average", torch.ones(1, width))
        self.longest = 1

    def factor(self, x: Tensor) -> Tensor:
        factor = self.average.mean(0) / self.longest
        if self.longest < 3:
            self.longest += 1
            self.average = torch.cat([self.average, x.mean(0, keepdim=True)])
        return factor


class Dropping(Block):
    """Draws from generators of Python and numpy, and from one of torch that it makes anew from time to time."""

    generator: torch.Generator | None = None
    calls = 0

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.numbers = np.random.default_rng(0)

    def factor(self, x: Tensor) -> Tensor:
        if self.generator is None or self.calls % 3 == 2:
            self.generator = torch.Generator().manual_seed(self.calls)
        self.calls += 1
        own = torch.rand(WIDTH, generator=self.generator).to(x.device)
        return own * random.choice([0.5, 1.0, 2.0]) * np.random.rand() * self.numbers.random()


def changing(block: type[Block]) -> nn.Module:
    random.seed(0)
    np.random.seed(0)
    return make(WIDTH, 3, block)


@pytest.mark.parametrize("block", [Averaging, Hidden, Late, Lazy, Replaced, Dropping])
def test_what_forward_changes(block: type[Block], device: torch.device) -> None:
    # As when the profile is in the cache: in taking it forward changes more than it puts back.
    model = changing(block)
    shared_profile(model, batches()[0], optimizer=adamw(model), device=device, dtype=torch.float32)
    specs = (SPECS[0], SPECS[1], SPECS[3])
    check_equal_to_plain(partial(changing, block), batches(4), device=device, specs=specs)


def test_a_huge_buffer_that_is_first_changed_later_is_refused_once(device: torch.device) -> None:
    model = changing(HugeLate)
    shared_profile(model, batches()[0], optimizer=adamw(model), device=device, dtype=torch.float32)
    model = changing(HugeLate)
    wrapped, optimizer = wrap_under(SPECS[0], model, adamw(model), batches()[0], device=device)
    Loop().run(wrapped, optimizer, batches(HugeLate.starts))
    loss = wrapped(*batches()[0]).square().mean()
    with pytest.raises(MisuseError, match="needs average as it was in forward"):
        loss.backward()
    optimizer.zero_grad()
    assert len(Loop().run(wrapped, optimizer, batches(2))) == 2


# -- what happens between forward and backward -------------------------------------------------------------------------


class FromAll(Block):
    """A block that takes the outputs of all before it, in a list that grows, and the last one, out of a dictionary."""

    def forward(self, context: Any) -> Tensor:
        return torch.tanh(self.linear(torch.stack(context["all"]).sum(0))) + context["last"]


class Growing(Model):
    def forward(self, x: Tensor) -> Tensor:
        context: dict[str, Any] = {"all": [self.enter(x)]}
        for block in self.blocks:
            context["last"] = context["all"][-1]
            context["all"].append(block(context))
        return self.leave(context["all"][-1])


def test_collections_that_grow_meanwhile(device: torch.device) -> None:
    check_equal_to_plain(partial(Growing, 32, 4, FromAll), batches(2), device=device, specs=SPECS[:3])


def freeze(model: nn.Module) -> None:
    model.get_submodule("blocks.1").requires_grad_(False)


# What a script does before the forward, and between it and its backward.
SWITCHES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "evaluated": (nn.Module.eval, nn.Module.train),
    "trained": (nn.Module.train, nn.Module.eval),
    "frozen since": (nn.Module.requires_grad_, freeze),
    "frozen before": (freeze, nn.Module.requires_grad_),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_modes_that_are_switched_meanwhile(name: str, device: torch.device) -> None:
    before, between = SWITCHES[name]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        before(model)
        found: Tensor = model(*batch).square().mean()
        between(model)
        return found

    check_equal_to_plain(make, batches(2), run=Loop(loss=loss).run, device=device, specs=SPECS[:3])


def test_other_operations_are_named() -> None:
    class Wavering(Block):
        wide = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return torch.tanh(y.view(-1, 4) if self.wide else y).view(x.shape)

    model = make(8, 3, Wavering)
    wrapped, _ = wrap_under(SPECS[0], model, adamw(model), batches()[0])
    loss = wrapped(*batches()[0]).square().mean()
    Wavering.wide = True
    with pytest.raises(MisuseError, match=r"of shape \(16, 8\) in forward and .* of shape \(32, 4\) in its place when"):
        loss.backward()


# -- key/value caches --------------------------------------------------------------------------------------------------


def with_cache(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, use_cache=True).loss
    return loss


def with_past(model: nn.Module, batch: Batch) -> Tensor:
    """The second half of the text, after what the first half left in the cache, with gradients through that too."""
    halves = ({name: value.chunk(2, dim=1)[half].contiguous() for name, value in batch.items()} for half in (0, 1))
    first, second = halves
    output: Any = model(**first, use_cache=True)
    loss: Tensor = model(**second, past_key_values=output.past_key_values).loss
    return loss + output.loss


@pytest.mark.parametrize(("family", "loss"), [("gpt2", with_past), ("llama", with_cache), ("t5", with_past)])
def test_a_recomputed_block_adds_once_to_a_cache(
    tiny_model: Callable[..., nn.Module],
    tiny_batch: Callable[..., Batch],
    family: str,
    loss: Callable[[nn.Module, Batch], Tensor],
    device: torch.device,
) -> None:
    data, specs = [tiny_batch(seed) for seed in range(2)], SPECS[:2]
    check_equal_to_plain(lambda: tiny_model(family), data, run=Loop(loss=loss).run, device=device, specs=specs)
