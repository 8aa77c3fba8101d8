"""A plain forward of one block, apart from the traced step: what autograd keeps of it, and how much it computes."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from protrain.attention import for_backward, is_attention
from protrain.profiler.attention_calls import AttentionCall, allocated_bytes, attention_call
from protrain.profiler.meter import Meter


@dataclass
class BlockUse:
    """What the calls of one block in one forward take together; the peak is of one call."""

    saved_bytes: int = 0
    saved_tensors: int = 0
    forward_peak_bytes: int = 0
    output_bytes: int = 0
    flops: int = 0
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
    count_flops: bool = True,
) -> None:
    """Call ``forward`` and add what it takes to ``use``; random states come out as they went in.

    Saved tensors are counted by storage, without those of ``constants`` (weights, buffers) and of the arguments.
    """
    saved: dict[StorageWeakRef, int] = {}
    given = tensors_in((args, kwargs))
    for tensor in given:
        if tensor.grad_fn is not None:  # not a mask, nor what the caller holds anyway
            use.inputs[storage_key(tensor)] = allocated_bytes(tensor)
    # Copies, because a block may write its inputs in place.
    args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    copies = {
        storage_key(copy): storage_key(tensor) for copy, tensor in zip(tensors_in((args, kwargs)), given, strict=True)
    }
    known = {*constants, *copies}

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key in copies:
            use.saved_inputs.add(copies[key])
        elif key not in known:
            saved[key] = allocated_bytes(tensor)
        return tensor.detach()  # an output kept with its own graph node would never be freed

    meter.reset_peak()
    before = meter.alive_bytes
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        _Flops() if count_flops else nullcontext() as flops,
    ):
        output = forward(*args, **kwargs)
    outputs = {
        storage_key(tensor): allocated_bytes(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()
    }
    use.forward_peak_bytes = max(use.forward_peak_bytes, meter.peak_bytes - before)
    use.saved_bytes += sum(saved.values())
    use.saved_tensors += len(saved)
    use.output_bytes += sum(size for key, size in outputs.items() if key not in known)
    if flops is not None:
        use.flops += flops.total
        use.attention += [call for key, call in flops.attention if key in saved]


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor in nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storage_key(tensor: Tensor) -> StorageWeakRef:
    """What identifies the storage of ``tensor``, without keeping it, for as long as the key lives."""
    return StorageWeakRef(tensor.untyped_storage())


class _Flops(TorchDispatchMode):
    """Floating-point operations of matrix products, convolutions and attention, by torch's formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.attention: list[tuple[StorageWeakRef, AttentionCall]] = []  # by what its backward saves

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and add what it computes."""
        result = func(*args, **(kwargs or {}))
        before = self.total
        formula = flop_registry.get(func._overloadpacket)
        name = func._overloadpacket.__name__
        if name.startswith("_scaled_dot_product") and not name.endswith("_backward"):
            self.total += _attention_flops(args[0], args[1], args[2])
        elif formula is not None:
            self.total += int(formula(*args, **(kwargs or {}), out_val=result))
        if is_attention(func):
            call = attention_call(func, args, kwargs or {}, result, flops=self.total - before)
            self.attention.append((storage_key(for_backward(result)), call))
        return result


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Of both products. torch's table lacks the CPU kernel, and before 2.13 grouped key and value heads."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
