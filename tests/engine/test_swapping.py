"""Swapped blocks, and inputs of recomputed ones, in host memory: the plain loop's bits, and planned memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import protrain
import protrain_kernels
from protrain.engine.activations import swap
from protrain.engine.gradients import reduction
from protrain.engine.states import parameter_state
from protrain.engine.streams import Streams, streams_for
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import Batch, Spec, adamw, check_equal_to_plain, default_loss, wrap_under

ROWS, WIDTH, DEPTH = 64, 32, 4
BOTH = [Spec("none", "least", "s", packed=packed) for packed in (False, True)]
MIXED = [Spec("some", "least", "scn", small=True, speculate=True, packed=packed) for packed in (False, True)]
MOVES = [
    Spec("all", "least", "i"),
    Spec("none", "least", "i", small=True),
    Spec("none", "least", "ic"),
    Spec("some", "least", "sin"),
]


class Block(nn.Module):
    """Saves views of one storage, a mask of bools, one column of a wide tensor, and a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.norm = nn.LayerNorm(half)
        self.fused, self.down = nn.Linear(half, 3 * half), nn.Linear(half, half)

    def forward(self, halves: tuple[Tensor, Tensor], *, extra: dict[str, Any], scale: float) -> Tensor:
        left, right = halves
        q, k, v = self.fused(self.norm(left)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) * scale
        mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(mask, -1e4).softmax(-1) @ v
        kept = torch.where(mixed > 0, mixed, 0.1 * mixed) * extra["table"].to(left.dtype) + extra["memory"][0]
        gate = torch.sigmoid(left[..., 3:4] * v[..., 5:6])
        return torch.cat([right.tanh() + F.dropout(self.down(kept), 0.2), left * gate], dim=-1)


class Rows(nn.Module):
    """Blocks that are given everything at once: a tuple of two views of one tensor, a tensor and a table for all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.encoder = nn.Linear(8, WIDTH // 2)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.leave = nn.Linear(WIDTH, 4)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0.5, 1.5, ROWS * WIDTH // 2).view(ROWS, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        extra = {"table": self.table * 2, "memory": [self.encoder(x)]}
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden.chunk(2, dim=-1), extra=extra, scale=0.25)
        return self.leave(hidden)


def rows(count: int) -> list[Batch]:
    return residual.batches(count, (ROWS, 8))


@pytest.mark.parametrize(
    ("dtype", "specs"),
    [(torch.float32, [BOTH[1], MIXED[0], *MOVES[::2]]), (torch.bfloat16, [BOTH[0], BOTH[1], MIXED[1], *MOVES[1::2]])],
    ids=str,
)
def test_what_is_moved_has_the_bits_of_the_plain_loop(
    dtype: torch.dtype, specs: list[Spec], device: torch.device
) -> None:
    check_equal_to_plain(Rows, rows(2), device=device, dtype=dtype, specs=specs)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[tuple[str, torch.dtype, int]]:
    """Every copy between device and host: its way, and the type and bytes that it moves."""
    found: list[tuple[str, torch.dtype, int]] = []
    kind = type(streams_for(device))
    for way in ("upload", "offload"):
        copy = getattr(kind, way)

        def counted(self: Streams, target: Tensor, source: Tensor, *, _copy: Any = copy, **marks: Any) -> None:
            found.append((_copy.__name__, source.dtype, source.nbytes))
            _copy(self, target, source, **marks)

        monkeypatch.setattr(kind, way, counted)
    return found


def step(model: nn.Module, optimizer: ProTrainOptimizer, batch: Batch) -> None:
    optimizer.backward(default_loss(model, batch))
    optimizer.step()
    optimizer.zero_grad()


def test_a_packed_block_is_one_copy_each_way(copies: list[Any], device: torch.device) -> None:
    found = {}
    for packed in (False, True):
        model, spec = Rows(), Spec("all", "least", "s", packed=packed)
        wrapped, optimizer = wrap_under(spec, model, adamw(model), rows(1)[0], device=device)
        for batch in rows(3):
            copies.clear()
            step(wrapped, optimizer, batch)
        found[packed] = Counter(way for way, *_ in copies)
        assert optimizer.report().device_bytes <= optimizer.plan.device_bytes
    with pytest.raises(ValueError, match=r"Plan\.pack_swaps must be empty or say something of each of 4 blocks"):
        dataclasses.replace(optimizer.plan, pack_swaps=(True,))
    assert found[True] == {"offload": DEPTH, "upload": DEPTH}
    assert found[False] == {"offload": 11 * DEPTH, "upload": 11 * DEPTH}


def test_the_engine_moves_tensors_by_the_public_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: Counter[str] = Counter()
    users = {"flatten": reduction, "unflatten": parameter_state, "pack": swap, "unpack": swap}
    for name, module in users.items():

        def counted(*args: Any, _name: str = name, **how: Any) -> Any:
            called[_name] += 1
            return getattr(protrain_kernels, _name)(*args, **how)

        monkeypatch.setattr(module, name, counted)
    model: nn.Module = Rows()
    model, optimizer = wrap_under(BOTH[1], model, adamw(model), rows(1)[0])
    x = rows(1)[0][0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), [x], create_graph=True)
    optimizer.backward(slope.square().mean())
    with protrain.full_parameters(model):
        assert model.get_parameter("blocks.0.down.weight").shape == (WIDTH // 2, WIDTH // 2)
    assert called.keys() == users.keys()


def test_inputs_are_offloaded_once_and_shared_tensors_stay(device: torch.device, copies: list[Any]) -> None:
    for modes, count in (("i", DEPTH), ("ic", DEPTH // 2), ("c", 0)):
        model = Rows()
        wrapped, optimizer = wrap_under(Spec("none", "least", modes), model, adamw(model), rows(1)[0], device=device)
        copies.clear()
        step(wrapped, optimizer, rows(1)[0])
        moved = [size_bytes for way, dtype, size_bytes in copies if way == "offload" and dtype is torch.uint8]
        assert moved == [ROWS * WIDTH * 4] * count, modes  # gradients are of another type
