"""A row that takes more memory than the machine has is left out of the kernel benchmarks, and gives its memory back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from bench.kernels import room
from bench.kernels.adam_states import States
from bench.kernels.room import leaving_out_what_does_not_fit
from protrain.engine.states.arena import Arena

CPU = torch.device("cpu")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("cannot map 9 GiB")])
def test_a_test_that_lacks_memory_is_skipped_and_holds_nothing(error: Exception) -> None:
    held = []

    def lack() -> None:
        tensor = torch.zeros(128)
        held.append(weakref.ref(tensor))
        raise error

    words = f"takes more memory than there is: {error}"
    with pytest.raises(pytest.skip.Exception, match=words), leaving_out_what_does_not_fit():
        lack()
    gc.collect()
    assert held[0]() is None


def test_another_error_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="illegal"), leaving_out_what_does_not_fit():
        raise RuntimeError("illegal memory access")


def test_states_that_the_host_has_no_room_for_are_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States.random(1024, torch.bfloat16, CPU, split_master=True)
    needed_bytes, arena = 1024 * 14, Arena(CPU)
    monkeypatch.setattr(room, "available_host_bytes", lambda: needed_bytes)
    with pytest.raises(MemoryError, match="14 KiB of host memory, of which 14 KiB are free"):
        states.on_host(arena)
    assert arena.total_bytes == 0
    monkeypatch.setattr(room, "available_host_bytes", lambda: 2 * needed_bytes)
    assert torch.equal(states.on_host(arena).weight, states.weight)
