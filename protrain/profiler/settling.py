"""Which steps of a profile count, and what their times are: those of training, where one step follows another.

A GPU that has waited is faster at first than in training: an H200 by 4% in a forward of 60 ms, by 1% to 2% in the
backward behind it (7 B width, 8 layers, 4 x 2048), until it has computed for some 0.6 s. A
step of two seconds (7 B, 8 x 2048) is timed best behind a quarter of one: its forward, which comes first, was 5.1% too
short behind none, 2.5% behind 0.7 s and right within 0.4% behind that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median, median_low
from typing import Any

import torch

from protrain.forward.compilation import graphs_compiled
from protrain.profiler.traced_step import Segment

SUSTAINED_MS = 1000.0  # of computing, before or in what counts
_BUSY_MS = 250.0
_BUSY_SIZE = 8192
_MOST_STEPS = 3  # that count

Durations = list[tuple[float, float]]  # of every segment in ms: the whole, and recomputation


def sustained(
    step: Callable[[], list[Segment]],
    device: torch.device,
    *,
    expected_ms: float,
    compiled: bool,
    sustained_ms: float = SUSTAINED_MS,
) -> list[Durations]:
    """Durations of the steps that count: of one, or of a few where one takes less than ``sustained_ms``.

    ``step`` queues one. Where it is expected to take that long, the GPU computes something else before; otherwise a few
    steps are queued together, and count but for the first of them. A step in which something was compiled never counts.
    """

    def alone() -> Durations:
        if device.type == "cuda" and expected_ms >= sustained_ms:
            _keep_busy(device)
        segments = step()
        finish(device)
        return durations(segments)

    known = graphs_compiled() if compiled else 0
    only = alone()
    if compiled and graphs_compiled() != known:
        only = alone()
    lasted_ms = _whole_ms(only)
    if lasted_ms >= sustained_ms:
        return [only]
    n_steps = min(_MOST_STEPS, math.ceil((sustained_ms - lasted_ms) / lasted_ms)) if lasted_ms > 0 else _MOST_STEPS
    queued = [step() for _ in range(1 + n_steps)]
    finish(device)
    return [durations(segments) for segments in queued[1:]]


def durations(segments: list[Segment]) -> Durations:
    """Of a step that is done."""

    def between(start: Any, end: Any) -> float:
        if start is None or end is None:
            return 0.0
        return float(start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else end - start)

    return [(between(segment.start, segment.end), between(segment.start, segment.recomputed)) for segment in segments]


def typical(steps: list[Durations]) -> Durations:
    """Of every segment the medians, of two the lesser: what else holds up a machine seldom holds up two steps."""
    return [
        (median_low(whole for whole, _ in segment), median_low(recomputation for _, recomputation in segment))
        for segment in zip(*steps, strict=True)
    ]


def expected_ms(segments: list[Segment]) -> float:
    """About what a step takes of which ``segments`` are the first, in whose blocks something may have been compiled."""
    total_ms = 0.0
    for phase in ("forward", "backward"):
        taken = [
            (segment.block, whole)
            for segment, (whole, _) in zip(segments, durations(segments), strict=True)
            if segment.phase == phase
        ]
        in_blocks = [whole for block, whole in taken if block is not None]
        total_ms += sum(whole for block, whole in taken if block is None)
        total_ms += len(in_blocks) * median(in_blocks or [0.0])
    return total_ms


def finish(device: torch.device) -> None:
    """Wait until the device has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _whole_ms(step: Durations) -> float:
    return sum(whole for whole, _ in step)


def _keep_busy(device: torch.device) -> None:
    """Queue products that take some ``_BUSY_MS``; nothing where they have no room."""
    generator = torch.Generator(device).manual_seed(0)
    size = (_BUSY_SIZE, _BUSY_SIZE)
    try:  # zeros would draw less power
        factor = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        product = torch.empty_like(factor)
    except torch.OutOfMemoryError:  # no reason for there to be no profile
        return
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.mm(factor, factor, out=product)  # the first loads the library's kernel
    start.record()
    torch.mm(factor, factor, out=product)
    end.record()
    end.synchronize()
    for _ in range(round(_BUSY_MS / start.elapsed_time(end))):
        torch.mm(factor, factor, out=product)
