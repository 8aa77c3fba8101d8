"""Measures the ceilings of this machine in a few seconds: products, copies, transfers, host memory and AdamW.

Every figure is the best of several repetitions: a ceiling, not an average of what else ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from protrain.hardware.detect import detect
from protrain.hardware.profile import HardwareProfile
from protrain_kernels import adam, adam_scalars

_REPETITIONS = 5


def calibrate(device: torch.device | str | None = None) -> HardwareProfile:
    """Measured profile of ``device`` ("cuda" where there is one, otherwise "cpu") and its host.

    Takes about a second on a CPU and ten on a GPU, and up to 2 GiB of either memory.
    """
    target = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    base = detect(target)
    size = 256 * 1024**2 if target.type == "cuda" else 16 * 1024**2  # bytes of every copied tensor
    host = torch.ones(size // 4)
    other = torch.empty_like(host)
    third = torch.ones_like(host)
    triad_s = _seconds(lambda: torch.add(third, host, alpha=0.5, out=other), torch.device("cpu"))
    host_adam = _adam_gparams(torch.device("cpu"), size // 8)
    measured = replace(
        base,
        source="measured",
        matmul_tflops=_matmul_tflops(target),
        host_dram_gbps=4 * size / triad_s / 1e9,  # two read, and a line that is written is read first
        host_adam_gparams=host_adam,
    )
    if target.type == "cpu":
        copy_s = _seconds(lambda: other.copy_(host), target)
        one_way = size / copy_s / 1e9
        return replace(
            measured,
            device_copy_gbps=2 * one_way,
            h2d_gbps=one_way,
            d2h_gbps=one_way,
            bidirectional_gbps=one_way,
            device_adam_gparams=host_adam,
        )
    with torch.cuda.device(target):
        return _gpu(measured, target, size)


def _gpu(measured: HardwareProfile, device: torch.device, size: int) -> HardwareProfile:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    up_from, down_to = (torch.ones(size // 4, pin_memory=True) for _ in range(2))
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def both() -> None:
        current = torch.cuda.current_stream(device)
        for stream, to, origin in ((up, target, up_from), (down, down_to, source)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                to.copy_(origin, non_blocking=True)
        for stream in (up, down):
            current.wait_stream(stream)

    def gbps(run: Callable[[], object], moved: int) -> float:
        return moved / _seconds(run, device) / 1e9

    return replace(
        measured,
        device_copy_gbps=gbps(lambda: target.copy_(source), 2 * size),
        h2d_gbps=gbps(lambda: target.copy_(up_from, non_blocking=True), size),
        d2h_gbps=gbps(lambda: down_to.copy_(source, non_blocking=True), size),
        bidirectional_gbps=gbps(both, 2 * size),
        device_adam_gparams=_adam_gparams(device, size // 4),
    )


def _matmul_tflops(device: torch.device) -> float:
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))  # zeros would draw less power
    return 2 * n**3 / _seconds(lambda: left @ right, device) / 1e12


def _adam_gparams(device: torch.device, elements: int) -> float:
    """Rate of the AdamW kernel with the split master, in 1e9 parameters a second."""
    elements -= elements % 128
    weight = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    master = torch.zeros(elements, dtype=torch.int16, device=device)
    exp_avg, exp_avg_sq = (torch.zeros(elements, device=device) for _ in range(2))
    grad = torch.ones(elements, dtype=torch.bfloat16, device=device)
    scalars = adam_scalars(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, decoupled=True)

    def update() -> Tensor:
        adam(weight, master, exp_avg, exp_avg_sq, grad, scalars)
        return weight

    return elements / _seconds(update, device) / 1e9


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs, after one that warms up."""
    best = float("inf")
    for repetition in range(_REPETITIONS + 1):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            taken = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            run()
            taken = time.perf_counter() - begin
        if repetition:
            best = min(best, taken)
    return best
