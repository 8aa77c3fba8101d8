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
from tests.engine.harness import Batch, Spec, adamw, check_equal_to_plain, default_loss, wrap_under
from tests.engine.true_memory import make_batch, make_model, train

CPU = torch.device("cpu")
WIDTH, DEPTH = 32, 4
BOTH = [Spec("none", "least", "s", packed=packed) for packed in (False, True)]
MIXED = [Spec("some", "least", "scn", small=True, speculate=True, packed=packed) for packed in (False, True)]


class Block(nn.Module):
    """Saves views of one storage, a mask of bools, one column of a wide tensor, and a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.fused(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -1e4)
        mixed = scores.softmax(-1) @ v
        kept = torch.where(mixed > 0, mixed, 0.1 * mixed)
        gate = torch.sigmoid(x[..., 3:4] * v[..., 5:6])
        return x + gate * F.dropout(self.down(kept), 0.2)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


def stack_batches(count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 24, WIDTH, generator=generator),) for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "specs"), [(torch.float32, [BOTH[1], MIXED[0]]), (torch.bfloat16, [BOTH[0], BOTH[1], MIXED[1]])], ids=str
)
def test_masks_and_views_have_the_plain_bits(dtype: torch.dtype, specs: list[Spec], device: torch.device) -> None:
    check_equal_to_plain(Stack, stack_batches(2), device=device, dtype=dtype, specs=specs)


def copies_of(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> tuple[ProTrainOptimizer, Counter[str]]:
    """The copies of the third step, by direction, and whose they are."""
    model: nn.Module = Stack()
    model, optimizer = wrap_under(spec, model, adamw(model), stack_batches()[0])
    counts: Counter[str] = Counter()
    kind = type(streams_for(CPU))
    for name in ("upload", "offload"):

        def counted(self: Any, target: Tensor, source: Tensor, *, _name: str = name, **marks: Any) -> None:
            counts[_name] += 1
            target.copy_(source)

        monkeypatch.setattr(kind, name, counted)
    for batch in stack_batches():
        counts.clear()
        optimizer.backward(default_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, counts


def test_a_packed_block_is_one_copy_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for packed in (False, True):
        spec = Spec("all", "least", "s", packed=packed)
        with monkeypatch.context() as patch:
            optimizer, found[packed] = copies_of(spec, patch)
        plan = optimizer.plan
    with pytest.raises(ValueError, match=r"Plan\.pack_swaps must be empty or say something of each of 4 blocks"):
        dataclasses.replace(plan, pack_swaps=(True,))
    assert found[True] == {"offload": DEPTH, "upload": DEPTH}
    assert found[False] == {"offload": found[False]["upload"], "upload": found[False]["upload"]}
    assert found[False]["upload"] == 10 * DEPTH


def test_the_engine_moves_tensors_by_the_public_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: Counter[str] = Counter()
    users = {"flatten": reduction, "unflatten": parameter_state, "pack": swap, "unpack": swap}
    for name, module in users.items():

        def counted(*args: Any, _name: str = name, **how: Any) -> Any:
            called[_name] += 1
            return getattr(protrain_kernels, _name)(*args, **how)

        monkeypatch.setattr(module, name, counted)
    model: nn.Module = Stack()
    model, optimizer = wrap_under(BOTH[1], model, adamw(model), stack_batches()[0])
    x = stack_batches()[0][0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), [x], create_graph=True)
    optimizer.backward(slope.square().mean())
    with protrain.full_parameters(model):
        assert model.get_parameter("blocks.0.down.weight").shape == (WIDTH, WIDTH)
    assert called.keys() == users.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_on_a_gpu_a_block_is_one_copy_each_way_and_within_the_plan(family: str) -> None:
    device = torch.device("cuda", 0)
    for packed in (False, True):
        model, batch = make_model(family), make_batch()
        spec = Spec("all", "least", "s", packed=packed)
        model, optimizer = wrap_under(spec, model, adamw(model), batch, device=device, dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, batch, steps=3)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            train(model, optimizer, batch)
            torch.cuda.synchronize()
        names = [str(event.name) for event in trace.events()]
        n_blocks = len(optimizer.plan.block_modes)
        for way in ("Memcpy DtoH", "Memcpy HtoD"):
            n_copies = sum(name.startswith(way) for name in names)
            assert n_copies <= n_blocks + 6 if packed else n_copies >= 8 * n_blocks, way
        assert optimizer.report().device_bytes <= optimizer.plan.device_bytes


# -- inputs of recomputed blocks ---------------------------------------------------------------------------------------


ROWS, ROW_WIDTH, N_BLOCKS = 64, 32, 6
INPUT_BYTES = ROWS * ROW_WIDTH * 4
MOVES = (
    Spec("all", "least", "i"),
    Spec("none", "least", "i", small=True),
    Spec("none", "least", "ic"),
    Spec("some", "least", "sin"),
)


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[int]:
    """Bytes of every storage that goes to host memory; gradients are of another dtype."""
    found: list[int] = []
    kind = type(streams_for(device))
    offload = kind.offload

    def counted(self: Streams, target: Tensor, source: Tensor, **marks: Any) -> None:
        if source.dtype is torch.uint8:
            found.append(source.nbytes)
        offload(self, target, source, **marks)

    monkeypatch.setattr(kind, "offload", counted)
    return found


def step(model: nn.Module, optimizer: ProTrainOptimizer, batch: Batch) -> None:
    optimizer.backward(default_loss(model, batch))
    optimizer.step()
    optimizer.zero_grad()


class Rows(nn.Module):
    """Blocks that are given everything at once: a tuple of two views of one tensor, a tensor and a table for all."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(ROW_WIDTH // 2)
            self.linear = nn.Linear(ROW_WIDTH // 2, ROW_WIDTH // 2)
            self.drop = nn.Dropout(0.1)

        def forward(self, halves: tuple[Tensor, Tensor], *, extra: dict[str, Any], scale: float) -> Tensor:
            left, right = halves
            hidden = torch.tanh(self.linear(self.norm(left))) * extra["table"].to(left.dtype)
            hidden = hidden + extra["memory"][0] * scale
            return torch.cat([right.tanh() + self.drop(hidden), left * hidden.sigmoid()], dim=-1)

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, ROW_WIDTH)
        self.encoder = nn.Linear(8, ROW_WIDTH // 2)
        self.blocks = nn.ModuleList(self.Block() for _ in range(N_BLOCKS))
        self.leave = nn.Linear(ROW_WIDTH, 4)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0.5, 1.5, ROWS * ROW_WIDTH // 2).view(ROWS, ROW_WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        extra = {"table": self.table * 2, "memory": [self.encoder(x)]}
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden.chunk(2, dim=-1), extra=extra, scale=0.5)
        return self.leave(hidden)


def rows(count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(ROWS, 8, generator=generator),) for _ in range(count)]


@pytest.mark.parametrize(("dtype", "specs"), [(torch.float32, MOVES[::2]), (torch.bfloat16, MOVES[1::2])])
def test_nested_views_and_shared_tensors_have_the_bits_of_the_plain_loop(
    device: torch.device, dtype: torch.dtype, specs: tuple[Spec, ...]
) -> None:
    check_equal_to_plain(Rows, rows(2), device=device, dtype=dtype, specs=specs)


def test_inputs_are_offloaded_once_and_shared_tensors_stay(device: torch.device, offloaded: list[int]) -> None:
    for modes, count in (("i", N_BLOCKS), ("ic", N_BLOCKS // 2), ("c", 0)):
        model = Rows()
        wrapped, optimizer = wrap_under(Spec("none", "least", modes), model, adamw(model), rows()[0], device=device)
        step(wrapped, optimizer, rows()[0])
        assert offloaded == [INPUT_BYTES] * count, modes
        offloaded.clear()
