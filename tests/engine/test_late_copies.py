"""The engine's bits when copies and host updates come at the worst moment that its own ordering allows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from tests.engine.harness import (
    FEW_PLANS,
    NONE,
    SWAP,
    Batch,
    Loop,
    Spec,
    Trainer,
    adamw,
    assert_same,
    default_loss,
    seeded,
    states,
    wrap_under,
)
from tests.engine.late_streams import Lateness
from tests.engine.plain_loop import prepare_plain

CPU = torch.device("cpu")
WIDTH = 16
SPECS = (
    *FEW_PLANS,
    Spec("none", "middle", (SWAP,)),
    Spec("none", "all", (SWAP, NONE), small=True),
)
KINDS = [Lateness("late"), Lateness("early"), *(Lateness("random", seed) for seed in range(3))]
Run = Callable[[nn.Module, Any], Any]


class Block(nn.Module):
    """A residual block with dropout that can be told to fail in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.first(self.norm(x))))
        if self.fails and hidden.requires_grad:
            hidden.register_hook(_fail)
        return x + self.second(hidden)


def _fail(_: Tensor) -> Tensor:
    raise ArithmeticError("backward fails")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def make() -> nn.Module:
    with seeded():
        return Model()


def batches(count: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 8, generator=generator),) for _ in range(count)]


@pytest.fixture(params=KINDS, ids=str)
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lateness]:
    """Engines of this test meet one kind of lateness."""
    kind = Lateness(request.param.schedule, request.param.seed)
    with kind.applied(monkeypatch):
        yield kind


_expected: dict[tuple[str, torch.dtype], Any] = {}


def check(run: Run, name: str, *, dtype: torch.dtype = torch.bfloat16, tight: bool = False, **options: Any) -> None:
    """What ``run`` returns, and the final states, are those of the plain loop under every plan."""
    if (name, dtype) not in _expected:
        torch.manual_seed(1)
        plain = make()
        model, trainer = prepare_plain(plain, adamw(plain), device=CPU, dtype=dtype)
        _expected[name, dtype] = run(model, trainer), states(model, trainer)
    values, final = _expected[name, dtype]
    for spec in SPECS:
        fresh = make()
        wrapped, optimizer = wrap_under(
            spec, fresh, adamw(fresh), batches()[0], device=CPU, dtype=dtype, tight=tight, key="late", **options
        )
        torch.manual_seed(1)
        assert run(wrapped, optimizer) == values, str(spec)
        assert_same(states(wrapped, optimizer), final)
        optimizer._engine.streams.synchronize()


# -- loops -------------------------------------------------------------------------------------------------------------


def two_forwards(model: nn.Module, batch: Batch) -> Tensor:
    return default_loss(model, batch) + default_loss(model, (batch[0].flip(0),)) * 0.5


def looked_at_between(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        before = default_loss(model, batch)
    with torch.inference_mode():
        model(batch[0][:2])
    return default_loss(model, batch) * (1 + before)


def looked_at_inside(model: nn.Module, batch: Batch) -> Tensor:
    loss = default_loss(model, batch)
    with torch.no_grad():
        default_loss(model, (batch[0][:4],))
    return loss


def dropped(model: nn.Module, batch: Batch) -> Tensor:
    default_loss(model, batch)
    return default_loss(model, batch)


LOOPS = {
    "plain": Loop(),
    "clipped": Loop(max_norm=0.1),
    "two forwards": Loop(max_norm=0.5, loss=two_forwards),
    "evaluation between": Loop(loss=looked_at_between),
    "evaluation inside": Loop(loss=looked_at_inside),
    "a forward dropped": Loop(loss=dropped),
    "accumulation": Loop(max_norm=0.5, accumulate=2),
    "accumulation without sync": Loop(accumulate=3, no_sync=True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, lateness: Lateness) -> None:
    check(lambda model, optimizer: LOOPS[name].run(model, optimizer, batches(6)), name)


def test_accumulation_in_host_memory(lateness: Lateness) -> None:
    loop = LOOPS["accumulation"]
    check(lambda model, optimizer: loop.run(model, optimizer, batches(6)), "accumulation", tight=True)


def test_float16_with_skipped_steps(lateness: Lateness) -> None:
    loop = Loop(max_norm=0.5, loss=lambda model, batch: default_loss(model, batch) * 64)
    check(lambda model, optimizer: loop.run(model, optimizer, batches(6)), "fp16", dtype=torch.float16)


def test_updates_inside_backward(lateness: Lateness) -> None:
    check(
        lambda model, optimizer: Loop(accumulate=2, no_sync=True).run(model, optimizer, batches(6)),
        "accumulation inside backward",
        step_during_backward=True,
    )


# -- what is done between the parts of a step --------------------------------------------------------------------------


def evaluate_after_backward(model: nn.Module, optimizer: Trainer) -> list[float]:
    values = []
    for batch in batches():
        default_loss(model, batch).backward()
        optimizer.clip_grad_norm_(0.1)
        with torch.no_grad():
            values.append(float(default_loss(model, batch)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            values.append(float(default_loss(model, batch)))
    return values


def several_backwards(model: nn.Module, optimizer: Trainer) -> None:
    for batch in batches():
        first, second = default_loss(model, batch), default_loss(model, (batch[0].flip(1),))
        second.backward(retain_graph=True)
        first.backward()
        second.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def backwards_without_step(model: nn.Module, optimizer: Trainer) -> None:
    for number, batch in enumerate(batches(6)):
        default_loss(model, batch).backward()
        if number % 2:
            optimizer.step()
        optimizer.zero_grad()


def inputs_get_gradients(model: nn.Module, optimizer: Trainer) -> list[float]:
    values = []
    for batch in batches(4):
        x = batch[0].clone().requires_grad_()
        default_loss(model, (x,)).backward()
        (other,) = torch.autograd.grad(model(x).float().sum(), [x])
        assert x.grad is not None
        values += [float(x.grad.sum()), float(other.sum())]
        optimizer.step()
        optimizer.zero_grad()
    return values


def failures(model: nn.Module, optimizer: Trainer) -> list[float]:
    values = []
    block: Any = model.get_submodule("blocks.1")
    for number, batch in enumerate(batches(6)):
        if number in (1, 3, 4):
            block.fails = True
            with pytest.raises(ArithmeticError, match="backward fails"):
                default_loss(model, batch).backward()
            block.fails = False
            if number == 3:
                with torch.no_grad():
                    values.append(float(default_loss(model, batch)))
            optimizer.zero_grad()
        default_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values


def states_between(model: nn.Module, optimizer: Trainer) -> list[float]:
    values = []
    for batch in batches():
        values.append(sum(float(value.sum()) for value in model.state_dict().values()))
        default_loss(model, batch).backward()
        values.append(sum(float(value.sum()) for value in model.state_dict().values()))
        optimizer.step()
        values.append(float(optimizer.export_parameter("blocks.2.first.weight")["exp_avg"].sum()))
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.zero_grad()
    return values


BETWEEN: dict[str, Run] = {
    run.__name__.replace("_", " "): run
    for run in (
        evaluate_after_backward,
        several_backwards,
        backwards_without_step,
        inputs_get_gradients,
        failures,
        states_between,
    )
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between(name: str, lateness: Lateness) -> None:
    check(BETWEEN[name], name)


def test_edited_weights_reach_the_device(lateness: Lateness) -> None:
    for spec in SPECS:
        model = make()
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=CPU, key="late")
        for batch in batches():
            loss = default_loss(wrapped, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with protrain.full_parameters(wrapped):
                for parameter in wrapped.parameters():
                    parameter.data.mul_(0.5)
            weights = {name: value.clone() for name, value in wrapped.state_dict().items()}
            plain = make().eval()
            plain.load_state_dict(weights)
            wrapped.eval()
            with torch.no_grad():
                assert torch.equal(wrapped(*batch), plain(*batch)), str(spec)
            wrapped.train()


def test_a_model_is_dropped_while_copies_are_on_their_way(lateness: Lateness) -> None:
    for spec in SPECS:
        for _ in range(2):
            model = make()
            wrapped, optimizer = wrap_under(spec, model, adamw(model), batches()[0], device=CPU, key="late")
            default_loss(wrapped, batches()[0]).backward()
            optimizer.step()
            loss = default_loss(wrapped, batches()[1])
            streams = lateness.streams[-1]
            del model, wrapped, optimizer, loss
            gc.collect()
            streams.synchronize()
