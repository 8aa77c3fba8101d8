"""Updates overlap the next forward: step() doesn't wait, a fetch waits for its own chunk alone, reading state for all.

The host optimizer is gated: an update ends only once its chunk's gate is open. Whoever waits for more than it needs
therefore runs into the time limit, on a machine of any speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.optim.optimizer import ProTrainOptimizer
from protrain_kernels import adam
from tests.engine.harness import Spec, adamw, wrap_under

BLOCKS = 5
WIDTH = 16
PATIENCE_S = 240.0


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Chain(nn.Module):
    """Block i is chunk i; ``enter`` is told before it is called. (A hook on it would have its weights.)"""

    def __init__(self) -> None:
        super().__init__()
        self.enter: Callable[[int], None] = lambda index: None
        self.layers = nn.ModuleList(Block(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.enter(index)
            x = layer(x)
        return x.square().mean()


class Gates:
    """Stands in for ``adam``: on the host's thread it waits for the gate of the chunk."""

    def __init__(self) -> None:
        self.open = [threading.Event() for _ in range(BLOCKS)]
        self.started: list[int] = []
        self.finished: list[int] = []
        self.failing: int | None = None
        self.index: dict[int, int] = {}

    def __call__(self, weight: Tensor, *rest: Any, **options: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        chunk = self.index[weight.data_ptr()]
        self.started.append(chunk)
        if not self.open[chunk].wait(PATIENCE_S):
            raise TimeoutError(f"somebody waits for chunk {chunk} before its gate opens")
        if chunk == self.failing:
            raise ArithmeticError(f"the update of chunk {chunk} failed")
        adam(weight, *rest, **options)
        self.finished.append(chunk)

    def open_all(self) -> None:
        for gate in self.open:
            gate.set()


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    gates = Gates()
    monkeypatch.setattr("protrain.engine.states.chunks.adam", gates)
    yield gates
    gates.open_all()  # the worker must end


def wrap_chain(gates: Gates, buffers: str = "middle") -> tuple[Any, ProTrainOptimizer]:
    model = Chain()
    wrapped, optimizer = wrap_under(Spec("none", buffers, "n", small=True), model, adamw(model), batch())
    assert optimizer.plan.n_chunks == BLOCKS
    gates.index = {chunk.weight.data_ptr(): chunk.index for chunk in optimizer._engine.chunks}
    return wrapped, optimizer


def batch(seed: int = 0) -> tuple[Tensor]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def wait_until(condition: Callable[[], bool]) -> None:
    moment = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        moment.wait(0.01)
    raise TimeoutError


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("buffers", ["least", "middle", "all"])
def test_a_forward_waits_for_its_own_chunk_alone(gates: Gates, buffers: str, clipped: bool) -> None:
    model, optimizer = wrap_chain(gates, buffers)
    model(*batch()).backward()
    if clipped:
        optimizer.clip_grad_norm_(1e-3)
    optimizer.step()  # returns though no update can end
    optimizer.zero_grad()
    assert gates.finished == []

    finished_at_entry: list[list[int]] = []

    def enter(index: int) -> None:
        finished_at_entry.append(list(gates.finished))
        gates.open[index].set()

    model.enter = enter
    model(*batch(1)).backward()
    assert finished_at_entry == [list(range(index)) for index in range(BLOCKS)]
    assert gates.finished == list(range(BLOCKS)), "in the order in which the forward needs them"


def read_whole(model: nn.Module, _: ProTrainOptimizer) -> None:
    with protrain.full_parameters(model):
        pass


READERS: dict[str, Callable[[Any, ProTrainOptimizer], Any]] = {
    "model.state_dict": lambda model, optimizer: model.state_dict(),
    "a part's state_dict": lambda model, optimizer: model.layers[0].state_dict(),
    "optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
    "export_parameter": lambda model, optimizer: optimizer.export_parameter("layers.0.weight"),
    "full_parameters": read_whole,
}


@pytest.mark.parametrize("reader", READERS)
def test_reading_state_waits_for_every_update(gates: Gates, reader: str) -> None:
    model, optimizer = wrap_chain(gates)
    model(*batch()).backward()
    optimizer.step()
    wait_until(lambda: gates.started == [0])
    assert gates.finished == []
    threading.Timer(0.1, gates.open_all).start()
    READERS[reader](model, optimizer)
    assert gates.finished == list(range(BLOCKS))


@pytest.mark.parametrize("failing", [0, 3])
def test_an_error_in_an_update_is_raised_where_the_chunk_is_needed(gates: Gates, failing: int) -> None:
    model, optimizer = wrap_chain(gates)
    gates.failing = failing
    gates.open_all()
    entered: list[int] = []
    model.enter = entered.append
    model(*batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    entered.clear()
    for _ in range(2):  # it does not go away
        with pytest.raises(ArithmeticError, match=f"the update of chunk {failing} failed"):
            model(*batch())
    assert entered == [*range(failing + 1)] * 2
    for read in (model.state_dict, optimizer.state_dict):
        with pytest.raises(ArithmeticError, match=f"the update of chunk {failing} failed"):
            read()
    assert sorted(gates.finished) == [index for index in range(BLOCKS) if index != failing], "the others were done"
