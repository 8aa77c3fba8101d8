"""A plain forward of one block, apart from the traced step: what autograd keeps of it, and how much it computes."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from protrain.common.parameters import made_of
from protrain.common.trees import map_leaves, tensors_in
from protrain.profiler.attention_calls import AttentionCall, allocated_bytes
from protrain.profiler.meter import Meter
from protrain.profiler.operations import Operations, storage_key


@dataclass
class BlockUse:
    """What the calls of one block in one forward take together; the peak is of one call."""

    saved_bytes: int = 0
    saved_tensors: int = 0
    saved_bool_bytes: int = 0
    forward_peak_bytes: int = 0
    output_bytes: int = 0
    flops: int = 0
    traffic_bytes: int = 0  # of what is neither a product nor attention
    fused_bytes: int = 0  # the same of a compiled block
    attention: list[AttentionCall] = field(default_factory=list)
    inputs: dict[StorageWeakRef, int] = field(default_factory=dict)  # storage of an argument with a graph -> bytes
    saved_inputs: set[StorageWeakRef] = field(default_factory=set)  # those of them that autograd keeps for the block


def probe(
    use: BlockUse,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constants: Set[StorageWeakRef],
    meter: Meter,
    device: torch.device,
    *,
    count: bool = True,
) -> None:
    """Call ``forward`` and add what it takes to ``use``; random states come out as they went in.

    Saved tensors are counted by storage, without those of ``constants`` (weights, buffers) and of the arguments.
    """
    saved: dict[StorageWeakRef, int] = {}
    of_others: set[StorageWeakRef] = set()  # storages of which more than bools is saved
    given = tensors_in((args, kwargs))
    for tensor in given:
        if tensor.grad_fn is not None:  # not a mask, nor what the caller holds anyway
            use.inputs[storage_key(tensor)] = allocated_bytes(tensor)
    # Copies, because a block may write its inputs in place.
    args, kwargs = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    copies = {
        storage_key(copy): storage_key(tensor) for copy, tensor in zip(tensors_in((args, kwargs)), given, strict=True)
    }
    known = {*constants, *copies}

    def pack(tensor: Tensor) -> Tensor:
        for part in made_of(tensor).values():
            key = storage_key(part)
            if key in copies:
                use.saved_inputs.add(copies[key])
            elif key not in known:
                saved[key] = allocated_bytes(part)
                if part.dtype != torch.bool:
                    of_others.add(key)
        return tensor.detach()  # an output kept with its own graph node would never be freed

    meter.reset_peak()
    before = meter.alive_bytes
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        Operations() if count else nullcontext() as operations,
    ):
        output = forward(*args, **kwargs)
    outputs = {
        storage_key(tensor): allocated_bytes(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()
    }
    use.forward_peak_bytes = max(use.forward_peak_bytes, meter.peak_bytes - before)
    use.saved_bytes += sum(saved.values())
    use.saved_tensors += len(saved)
    use.saved_bool_bytes += sum(size for key, size in saved.items() if key not in of_others)
    use.output_bytes += sum(size for key, size in outputs.items() if key not in known)
    if operations is not None:
        operations.saved(saved.keys())
        use.flops += operations.flops
        use.traffic_bytes += operations.traffic_bytes
        use.fused_bytes += operations.fused_bytes
        use.attention += [call for key, call in operations.attention if key in saved]
