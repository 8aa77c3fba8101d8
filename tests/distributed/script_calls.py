"""What ranks do in ``test_script_calls.py``: a training, in which some call collectives of ``torch.distributed``."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from protrain.distributed import watch
from tests.distributed.out_of_step import batch, step, wrapped


def stuck(rank: int, size: int, odd: int, call: str, where: str, times: dict[str, float], device: str = "cpu") -> None:
    """Train. Rank ``odd`` makes ``call`` where the others do not, which wait for it in ``where``."""
    model = _after_a_step(rank, times, device)
    value = batch(rank, 1)
    if where == "forward" and rank == odd:
        _call(call, device)
    loss = model(value)
    if where == "backward" and rank == odd:
        _call(call, device)
    loss.backward()
    if where == "state_dict":
        if rank == odd:
            _call(call, device)
        model.state_dict()


def legal(rank: int, size: int, what: str, times: dict[str, float]) -> None:
    """Train on three ranks. Before the second step rank 1 waits in a collective for rank 2, which is slow."""
    model = _after_a_step(rank, times)
    pair = dist.new_group([1, 2])
    values, work = torch.ones(1), None
    if rank == 2:
        time.sleep(2.5)
    if what == "pair":
        if rank != 0:
            dist.barrier(group=pair)
    else:
        assert what == "async"
        work = dist.all_reduce(values, async_op=rank == 0)
    model(batch(rank, 1)).backward()
    if work is not None:
        work.wait()
    print(f"trained, with {values.item():.0f}", flush=True)


def _after_a_step(rank: int, times: dict[str, float], device: str = "cpu") -> nn.Module:
    """A model that was trained for a step. ``times`` changes those of the watcher, in seconds."""
    for name, seconds in times.items():
        assert hasattr(watch, name)
        setattr(watch, name, seconds)
    model, optimizer = wrapped(rank, device)
    step(model, optimizer, batch(rank, 0))
    return model


def _call(call: str, device: str) -> None:
    print("calls", flush=True)
    if call == "barrier":
        dist.barrier()
    else:
        assert call == "all_reduce"
        dist.all_reduce(torch.ones(1, device=device))
