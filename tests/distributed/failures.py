"""What ranks do in ``test_failures.py``: one fails, while the others wait for it outside the calls of ProTrain."""

from __future__ import annotations

import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from protrain.distributed import watch
from tests.distributed.out_of_step import batch, step, wrapped
from tests.distributed.test_profiles import Centred, wrap


def in_profile(rank: int, size: int, what: str, times: dict[str, float]) -> None:
    """Wrap a model whose forward waits for all ranks. Rank 1 fails in the profile as ``what`` says."""
    _set(times)
    dist.init_process_group("gloo")
    model = Centred(together=True)
    if rank == 1:
        model.register_forward_pre_hook(_out_of_memory if what == "out of memory" else _fails)
    wrap(model)


def in_script(rank: int, size: int, what: str, times: dict[str, float]) -> None:
    """Train. Rank 1 fails between steps, in a script that ends its process group whatever happens, as ``what`` says."""
    _set(times)
    model, optimizer = wrapped(rank, "cpu")
    step(model, optimizer, batch(rank, 0))
    try:
        if what == "ends":
            if rank == 0:
                model.state_dict()
            return
        if rank == 1:
            if what == "out of memory":
                hook = model.get_submodule("blocks.1").register_forward_pre_hook(_out_of_memory)
                with suppress(torch.OutOfMemoryError):
                    model(batch(rank, 1))
                hook.remove()
                step(model, optimizer, batch(rank, 2))
            raise ValueError("the loader of a rank fails")
        step(model, optimizer, batch(rank, 1))
    finally:
        if what == "loader":
            dist.destroy_process_group()
            time.sleep(1.0)  # as for a logger that says goodbye


def _fails(model: nn.Module, args: tuple[Tensor]) -> None:
    raise ValueError("the profile of a rank fails")


def _out_of_memory(model: nn.Module, args: tuple[Tensor]) -> None:
    if not args[0].is_meta:
        raise torch.OutOfMemoryError("CUDA out of memory")


def _set(times: dict[str, float]) -> None:
    for name, seconds in times.items():
        assert hasattr(watch, name)
        setattr(watch, name, seconds)
