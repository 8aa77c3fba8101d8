"""What rank 0 warns of: whole models in every process, more host memory than is free, ranks that train on the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from protrain.common.errors import warn_user
from protrain.common.parameters import fingerprint, is_plain
from protrain.common.tables import format_bytes
from protrain.common.trees import named_tensors
from protrain.distributed.ranks import Ranks
from protrain.distributed.watch import WAITING

_NOTEWORTHY = 0.1  # of the host memory of a node: what copies of a model may take without a word
# What the system takes beside pinned memory. It was 0.6% to 1.7% with one H100 or H200 and 2.1% to 3% with two or four
# H200s (torch 2.11, bench/results/h200/NOTES.md).
_OF_PINNED = 0.025


@contextmanager
def first_alone_warns(ranks: Ranks) -> Iterator[None]:
    """Inside, ranks but the first do not warn of what all ranks do alike. They still say whom they wait for."""
    if ranks.rank == 0:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message=WAITING)
        yield


def warn_of_copies(model: nn.Module, ranks: Ranks, *, host_bytes: int, is_limit: bool) -> None:
    """Warn if every process of a node holds a whole model in host memory, and these together take much of it.

    Args:
        model: before its weights are moved.
        ranks: that train it.
        host_bytes: the host memory of the node.
        is_limit: whether the user has set ``host_memory`` to that.

    Raises:
        ValueError: they take more than the limit that the user has set.
    """
    if not ranks.several:
        return
    own, count = _host_bytes(model), ranks.on_node
    total = own * count
    said = (
        f"each of the {count} processes on this machine holds the whole model in host memory, {format_bytes(total)} "
        f"({count} x {format_bytes(own)}) in all"
    )
    remedy = (
        "build it under `with protrain.empty_parameters():` and pass weights= to protrain.wrap, so that each process "
        "reads only its own part"
    )
    if is_limit and total > host_bytes:
        raise ValueError(f"{said}, more than host_memory={format_bytes(host_bytes)}: {remedy}")
    if ranks.rank == 0 and total > _NOTEWORTHY * host_bytes:
        warn_user(f"{said}, until protrain.wrap has moved it: {remedy}")


def warn_of_little_memory(
    model: nn.Module, ranks: Ranks, device: torch.device, *, plan_bytes: int, free_bytes: int
) -> None:
    """Warn if the plan takes more host memory than the node has free. The system would kill a process in training.

    ``host_memory`` may be more than is free, as some virtual machines grow.

    Args:
        model: before its weights are moved, which frees their memory.
        ranks: that train it.
        device: memory for a GPU is pinned.
        plan_bytes: of host memory, for each rank.
        free_bytes: of host memory, on the node.
    """
    count = ranks.on_node
    beside = _OF_PINNED if device.type == "cuda" else 0.0
    needed, free = plan_bytes * count, free_bytes + _host_bytes(model) * count
    if needed * (1 + beside) <= free:
        return
    tables = (
        f", beside which the system takes up to {format_bytes(needed * beside)} for pinned memory" if beside else ""
    )
    warn_user(
        f"the plan takes {format_bytes(needed)} of this machine's host memory{tables}, and {format_bytes(free)} are "
        "free: the system may kill a process in training. Unless the machine gets more, pass host_memory="
        f"'{int(free / (1 + beside) / 1024**2)}MiB' or less"
    )


def _host_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu")


def compare_first_batches(model: nn.Module, ranks: Ranks, device: torch.device) -> None:
    """Let the first call of ``model`` in the training warn of ranks with the same batch, or the same dropout."""
    if not ranks.several:
        return

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        handle.remove()
        drops = module.training and any(map(_drops, module.modules()))
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        # Tensors of other kinds, such as sparse ones, are not compared.
        found = [(name, fingerprint(part)) for name, part in named_tensors((args, kwargs)) if is_plain(part)]
        own = found or None, state.numpy().tobytes() if drops else None
        batches, states = zip(*ranks.all_values(own, "the first forward of the training"), strict=True)
        if ranks.rank == 0:
            _warn(batches, states)

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _warn(batches: Sequence[object], states: Sequence[object]) -> None:
    for values, what in (
        (
            batches,
            "train on the same first batch: give each rank its own part of the data, for example with "
            "torch.utils.data.DistributedSampler",
        ),
        (
            states,
            "begin with the same random numbers, so dropout makes the same choices on both: call "
            "torch.manual_seed(seed + rank) after protrain.wrap",
        ),
    ):
        # The first two ranks with the same value.
        for other, value in enumerate(values):
            if value is not None and value in values[:other]:
                warn_user(f"ranks {values.index(value)} and {other} {what}")
                break


def _drops(module: nn.Module) -> bool:
    """Whether ``module`` drops values at random: it is a dropout, or has the probability of one as an attribute."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
