"""Bytes come from host memory as they are, all of them and no others."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from protrain_kernels import from_host
from protrain_kernels.from_host import BLOCK, PROGRAMS, launch_from_host

COUNTS = [1, 7, 8, 12, 1024, 8 * BLOCK, 8 * BLOCK + 8, 8 * 3 * BLOCK - 8, 2 * BLOCK + 1]


def _source(count: int, first: int, device: torch.device) -> torch.Tensor:
    whole = torch.randint(256, (first + count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return (whole.pin_memory() if device.type == "cuda" else whole)[first:]


def _copy(backend: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    (launch_from_host if backend.interpreted else from_host)(source, target)


@pytest.mark.parametrize(
    ("of_source", "of_target"),
    [(0, 0), (1, 1), (8, 8), (1, 0), (0, 1), (8, 1), (3, 8)],
    ids=lambda first: f"by {first}",
)
@pytest.mark.parametrize("count", COUNTS)
def test_every_byte_and_none_beside(backend: Any, count: int, of_source: int, of_target: int) -> None:
    source = _source(count, of_source, backend.device)
    whole = torch.full((of_target + count + 16,), 0xA5, dtype=torch.uint8, device=backend.device)
    _copy(backend, source, whole[of_target : of_target + count])
    expected = torch.full_like(whole, 0xA5, device="cpu")
    expected[of_target : of_target + count] = source
    assert torch.equal(whole.cpu(), expected)


def test_a_view_whose_own_memory_is_not_aligned(backend: Any) -> None:
    memory = _source(80, 0, backend.device).numpy()
    source = torch.frombuffer(memory, dtype=torch.uint8, offset=1)[7:71]
    target = torch.zeros(64, dtype=torch.uint8, device=backend.device)
    _copy(backend, source, target)
    assert torch.equal(target.cpu(), source)


def test_programs_take_turns(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = PROGRAMS
    if backend.device.type == "cpu":
        programs = 3
        monkeypatch.setattr(sys.modules["protrain_kernels.from_host"], "PROGRAMS", programs)
    source = _source(8 * BLOCK * (2 * programs + 1) + 24, 0, backend.device)
    target = torch.zeros(source.numel(), dtype=torch.uint8, device=backend.device)
    _copy(backend, source, target)
    assert torch.equal(target.cpu(), source)


@pytest.mark.gpu
def test_nothing_is_launched_for_nothing() -> None:
    from_host(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_memory_that_the_gpu_cannot_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="source must be in pinned host memory"):
        from_host(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8, device="cuda"))


@pytest.mark.gpu
def test_it_does_not_wait_behind_a_bulk_copy() -> None:
    """Which a copy of the same bytes may have to, as both take the one copy engine of that direction."""
    bulk = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    sink = torch.empty_like(bulk, device="cuda")
    source, target = _source(1 << 17, 0, sink.device), torch.zeros(1 << 17, dtype=torch.uint8, device="cuda")
    from_host(source, target)  # compiles
    stream, copied, read = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        sink.copy_(bulk, non_blocking=True)
        copied.record()
    from_host(source, target)
    read.record()
    read.synchronize()
    assert not copied.query(), "some 20 ms"
    assert torch.equal(target.cpu(), source)
