"""The kernels that move the gradients of a transformer block into a chunk, and its activations into a buffer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protrain.hardware.calibration.tensors import random_tensor
from protrain.hardware.calibration.timing import measured
from protrain.hardware.profile import Figure
from protrain_kernels import PackPlan, flatten, padded, tiles


def _random(device: torch.device, *shape: int) -> Tensor:
    return random_tensor(math.prod(shape), torch.bfloat16, device).view(shape)


def flatten_figure(device: torch.device, hidden: int, *, budget_s: float, datasheet: float | None) -> Figure:
    """Bytes a second that ``flatten`` with squares reads and writes, on the bf16 gradients of a LLaMA block."""
    wide = hidden * 7 // 2 // 128 * 128
    shapes = [(hidden, hidden)] * 2 + [(hidden // 4, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
    gradients = [_random(device, *shape) for shape in shapes] + [_random(device, hidden) for _ in range(2)]
    offsets, starts, end, partials = [], [], 0, 0
    for gradient in gradients:
        offsets.append(end)
        starts.append(partials)
        end += padded(gradient.numel())
        partials += tiles(gradient.numel())
    chunk = torch.empty(end, dtype=torch.bfloat16, device=device)
    squares = torch.empty(partials, device=device)

    def run() -> None:
        flatten(gradients, chunk, offsets, squares, starts)

    moved = sum(gradient.nbytes for gradient in gradients) + chunk.nbytes
    return measured("flatten", run, device, moved / 1e9, "GB/s", budget_s=budget_s, datasheet=datasheet)


def pack_figure(device: torch.device, hidden: int, *, budget_s: float, datasheet: float | None) -> Figure:
    """Bytes a second that ``pack`` reads and writes, on what a block of 4096 tokens saves, with views and a mask."""
    tokens = hidden
    fused = _random(device, tokens, 3 * hidden)
    saved = [
        *(_random(device, tokens, hidden) for _ in range(6)),
        *fused.split(hidden, dim=1),
        *(_random(device, tokens, 7 * hidden // 2) for _ in range(2)),
        _random(device, tokens, hidden) > 0,
    ]
    plan = PackPlan(saved)
    buffer = torch.empty(plan.packed_bytes, dtype=torch.uint8, device=device)

    def run() -> None:
        plan.pack(saved, buffer)

    moved = plan.unpacked_bytes + plan.packed_bytes
    return measured("pack", run, device, moved / 1e9, "GB/s", budget_s=budget_s, datasheet=datasheet)
