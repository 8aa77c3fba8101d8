"""CKPT_SWAP moves the inputs of blocks and nothing else, and the device memory that it claims is free in truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain.engine.streams import Streams, streams_for
from protrain.optim.optimizer import ProTrainOptimizer
from tests.engine import residual
from tests.engine.harness import (
    CKPT,
    CKPT_SWAP,
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

CPU = torch.device("cpu")
ROWS, WIDTH, DEPTH = 64, 32, 6
INPUT_BYTES = ROWS * WIDTH * 4
MOVES = (
    Spec("all", "least", (CKPT_SWAP,)),
    Spec("none", "least", (CKPT_SWAP,), small=True),
    Spec("none", "least", (CKPT_SWAP, CKPT)),
    Spec("some", "least", (SWAP, CKPT_SWAP, NONE)),
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
            self.norm = nn.LayerNorm(WIDTH // 2)
            self.linear = nn.Linear(WIDTH // 2, WIDTH // 2)
            self.drop = nn.Dropout(0.1)

        def forward(self, halves: tuple[Tensor, Tensor], *, extra: dict[str, Any], scale: float) -> Tensor:
            left, right = halves
            hidden = torch.tanh(self.linear(self.norm(left))) * extra["table"].to(left.dtype)
            hidden = hidden + extra["memory"][0] * scale
            return torch.cat([right.tanh() + self.drop(hidden), left * hidden.sigmoid()], dim=-1)

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, WIDTH)
        self.encoder = nn.Linear(8, WIDTH // 2)
        self.blocks = nn.ModuleList(self.Block() for _ in range(DEPTH))
        self.leave = nn.Linear(WIDTH, 4)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0.5, 1.5, ROWS * WIDTH // 2).view(ROWS, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        extra = {"table": self.table * 2, "memory": [self.encoder(x)]}
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = block(hidden.chunk(2, dim=-1), extra=extra, scale=0.5)
        return self.leave(hidden)


def make_rows() -> nn.Module:
    with seeded():
        return Rows()


def rows(count: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(ROWS, 8, generator=generator),) for _ in range(count)]


@pytest.mark.parametrize(("dtype", "specs"), [(torch.float32, MOVES[::2]), (torch.bfloat16, MOVES[1::2])])
def test_nested_views_and_shared_tensors_have_the_bits_of_the_plain_loop(
    device: torch.device, dtype: torch.dtype, specs: tuple[Spec, ...]
) -> None:
    check_equal_to_plain(make_rows, rows(2), device=device, dtype=dtype, specs=specs)


def test_inputs_are_offloaded_once_and_shared_tensors_stay(device: torch.device, offloaded: list[int]) -> None:
    for modes, count in (((CKPT_SWAP,), DEPTH), ((CKPT_SWAP, CKPT), DEPTH // 2), ((CKPT,), 0)):
        model = make_rows()
        wrapped, optimizer = wrap_under(Spec("none", "least", modes), model, adamw(model), rows()[0], device=device)
        step(wrapped, optimizer, rows()[0])
        assert offloaded == [INPUT_BYTES] * count, modes
        offloaded.clear()


# -- device memory -----------------------------------------------------------------------------------------------------


def make_residual() -> nn.Module:
    return residual.make(WIDTH, depth=DEPTH)


def test_inputs_are_fetched_before_the_block_after_them_is_recomputed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    kind = type(streams_for(device))
    upload = kind.upload

    def noted(self: Streams, target: Tensor, source: Tensor, **marks: Any) -> None:
        if target.nbytes == INPUT_BYTES and target.dtype is torch.uint8:
            events.append("fetch")
        upload(self, target, source, **marks)

    model = make_residual()
    spec = Spec("all", "least", (CKPT_SWAP,))
    wrapped, optimizer = wrap_under(spec, model, adamw(model), rows()[0], device=device)
    for index in range(DEPTH):
        norm = wrapped.get_submodule(f"blocks.{index}.norm")
        norm.register_forward_pre_hook(lambda *_, index=index: events.append(f"block {index}"))
    monkeypatch.setattr(kind, "upload", noted)
    loss = default_loss(wrapped, rows()[0])
    assert events == [f"block {index}" for index in range(DEPTH)]
    events.clear()
    optimizer.backward(loss)
    # The last block's is fetched while backward is in the layer behind it.
    ahead = [event for index in range(DEPTH - 1, 0, -1) for event in ("fetch", f"block {index}")]
    assert events == ["fetch", *ahead, "block 0"]


def test_the_peak_falls_by_what_is_claimed() -> None:
    batch, peak, planned = rows()[0], {}, {}
    for mode in (CKPT, CKPT_SWAP):
        model = make_residual()
        spec = Spec("all", "least", (mode,))
        wrapped, optimizer = wrap_under(spec, model, adamw(model), batch, device=CPU, tight=True)
        for _ in range(2):
            step(wrapped, optimizer, batch)
        peak[mode], planned[mode] = optimizer.report().device_bytes, optimizer.plan.device_bytes
        assert peak[mode] <= planned[mode]
    # One is being computed with, one is on its way out or back.
    claimed = (DEPTH - 2) * INPUT_BYTES
    assert peak[CKPT] - peak[CKPT_SWAP] >= claimed - INPUT_BYTES
    assert claimed - INPUT_BYTES <= planned[CKPT] - planned[CKPT_SWAP] <= DEPTH * INPUT_BYTES
