"""Blocks swapped in one buffer, and storage by storage: the plain loop's bits, one copy each way, planned memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protrain.engine.streams import streams_for
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine.harness import (
    CKPT,
    NONE,
    SWAP,
    Batch,
    Spec,
    adamw,
    check_equal_to_plain,
    default_loss,
    seeded,
    wrap_under,
)
from tests.engine.true_memory import make_batch, make_model, train

CPU = torch.device("cpu")
WIDTH, DEPTH = 32, 4
BOTH = [Spec("none", "least", (SWAP,), packed=packed) for packed in (False, True)]
MIXED = [
    Spec("some", "least", (SWAP, CKPT, NONE), small=True, speculate=True, packed=packed) for packed in (False, True)
]


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


def make_stack() -> Stack:
    with seeded():
        return Stack()


def stack_batches(count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 24, WIDTH, generator=generator),) for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "specs"), [(torch.float32, [BOTH[1], MIXED[0]]), (torch.bfloat16, [BOTH[0], BOTH[1], MIXED[1]])], ids=str
)
def test_masks_and_views_have_the_plain_bits(dtype: torch.dtype, specs: list[Spec], device: torch.device) -> None:
    check_equal_to_plain(make_stack, stack_batches(2), device=device, dtype=dtype, specs=specs)


def copies_of(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> tuple[ProTrainOptimizer, Counter[str]]:
    """The copies of the third step, by direction, and whose they are."""
    model: nn.Module = make_stack()
    model, optimizer = wrap_under(spec, model, adamw(model), stack_batches()[0], device=CPU)
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
        spec = Spec("all", "least", (SWAP,), packed=packed)
        with monkeypatch.context() as patch:
            optimizer, found[packed] = copies_of(spec, patch)
        plan = optimizer.plan
    with pytest.raises(ValueError, match=r"Plan\.pack_swaps must be empty or say something of each of 4 blocks"):
        dataclasses.replace(plan, pack_swaps=(True,))
    assert found[True] == {"offload": DEPTH, "upload": DEPTH}
    assert found[False] == {"offload": found[False]["upload"], "upload": found[False]["upload"]}
    assert found[False]["upload"] == 10 * DEPTH


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_on_a_gpu_a_block_is_one_copy_each_way_and_within_the_plan(family: str) -> None:
    device = torch.device("cuda", 0)
    for packed in (False, True):
        model, batch = make_model(family), make_batch()
        spec = Spec("all", "least", (SWAP,), packed=packed)
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
