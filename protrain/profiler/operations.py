"""What a forward computes, moves and holds: flops of products and attention, bytes of the rest, and storages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.operator_schemas import normalize_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from protrain.common.parameters import made_of
from protrain.common.trees import tensors_in
from protrain.forward.dispatch import for_backward, is_attention

_CUDA_GRAIN_BYTES = 512  # CUDA's caching allocator rounds every allocation up to a multiple of this


def memory_in(tree: Any) -> list[Tensor]:
    """The plain tensors that all tensors in ``tree`` consist of. Each of them has a storage."""
    return [part for tensor in tensors_in(tree) for part in made_of(tensor).values()]


def storage_key(tensor: Tensor) -> StorageWeakRef:
    """An identifier for the storage of the plain ``tensor``.

    It is valid as long as the storage lives, and does not keep it alive.
    """
    return StorageWeakRef(tensor.untyped_storage())


def allocated_bytes(tensor: Tensor) -> int:
    """The bytes that the storage of ``tensor`` occupies on its device."""
    size = tensor.untyped_storage().nbytes()
    return -(-size // _CUDA_GRAIN_BYTES) * _CUDA_GRAIN_BYTES if tensor.is_cuda else size


def storages_in(tree: Any) -> dict[StorageWeakRef, int]:
    """The storages of all tensors in ``tree``, each with the bytes that it occupies on its device."""
    return {storage_key(tensor): allocated_bytes(tensor) for tensor in memory_in(tree)}


_FLASH = "_flash_attn_"  # of flash_attn: q, k and v [batch, tokens, heads, head size], or without the batch

_FOUR_BIT = "gemm_4bit"  # of bitsandbytes: activations [..., K] times a packed weight, whose own shape is (N, K)

_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces


def are_wrappers(types: Iterable[type]) -> bool:
    """Whether tensors of ``types`` consist of others (nested, quantised).

    Operators on them run operators on those others. A mode that returns NotImplemented for the former sees the latter.
    """
    return any(map(is_traceable_wrapper_subclass_type, types))


class Operations(TorchDispatchMode):
    """Counts the flops of products, convolutions and attention, and the bytes that other operators read and write.

    Use it as a context manager for each of several calls, and tell ``call_ends`` after each what that call left.

    ``traffic_bytes`` counts the other operators as if each ran alone. ``fused_bytes`` counts them as if a compiler
    fused them: they read each outside tensor once, and they write only what a product reads or what backward needs.
    Operators on tensors of other classes (nested, quantised) are counted as the operators that these run. Products of
    sparse tensors, and of nested ones of the older layout, are counted by their bytes, as moving takes their time.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.traffic_bytes = 0
        self.fused_bytes = 0
        self.collective = False  # whether one of the operators is a collective of torch.distributed
        self.attention_bytes = 0  # what attention puts out, where backward needs it
        self.attention_flops = 0
        # The attention of the running call: the storage that it saves for its backward, its bytes and its flops.
        self._attention: list[tuple[StorageWeakRef, int, int]] = []
        # results of fused operators that were not written to memory yet
        self._unwritten: dict[StorageWeakRef, int] = {}
        self._read: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count what it computes and moves."""
        if are_wrappers(types):
            return NotImplemented
        kwargs = kwargs or {}
        self.collective |= getattr(func, "namespace", "") in _COLLECTIVES
        dense = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors_in((args, kwargs)))
        if dense and not is_product(func) and isinstance(func, OpOverload) and func._can_decompose():
            with self:  # tensors of other classes run whole what autograd would have split up, such as aten.linear
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        sources, targets = _bytes_by_storage((args, kwargs)), _bytes_by_storage(result)
        flops = _flops_of(func, args, kwargs, result) if dense else None
        if flops is not None:
            self.flops += flops
            self._write(sources)
        # a view makes no new storage and moves nothing
        elif made := {key: size for key, size in targets.items() if key not in sources}:
            self.traffic_bytes += sum(sources.values()) + sum(made.values())
            read = {key: size for key, size in sources.items() if key not in self._unwritten and key not in self._read}
            self.fused_bytes += sum(read.values())
            self._read |= read.keys()
            self._unwritten |= made
        if is_attention(func) and (sums := for_backward(result)) is not None:
            self._attention.append((storage_key(sums), sum(storages_in(result).values()), flops or 0))
        return result

    def call_ends(self, saved: Collection[StorageWeakRef]) -> None:
        """The call is over, and backward needs the storages ``saved``."""
        self._write(saved)
        for sums, size, flops in self._attention:
            if sums in saved:
                self.attention_bytes += size
                self.attention_flops += flops
        self._attention.clear()
        self._unwritten.clear()
        self._read.clear()

    def _write(self, keys: Iterable[StorageWeakRef]) -> None:
        """Count the storages ``keys`` as written, because a product reads them or backward needs them."""
        self.fused_bytes += sum(self._unwritten.pop(key, 0) for key in keys)


def _bytes_by_storage(tree: Any) -> dict[StorageWeakRef, int]:
    """The bytes that an operator touches of each storage. A view may be of a part, or may repeat the same elements."""
    return {
        storage_key(tensor): min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        for tensor in memory_in(tree)
    }


def is_product(func: Any) -> bool:
    """Whether ``func`` is a matrix product, a convolution or attention, which a compiler leaves to a library."""
    packet = getattr(func, "_overloadpacket", func)  # an operator that takes other operators has no packet
    return packet in flop_registry or packet.__name__.startswith(("_scaled_dot_product", _FLASH, _FOUR_BIT))


def _flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """The flops of a product, convolution or attention; None for any other operator."""
    if not is_product(func):
        return None
    packet = getattr(func, "_overloadpacket", func)
    if packet.__name__.startswith(("_scaled_dot_product", _FLASH)) and not packet.__name__.endswith("_backward"):
        given = normalize_function(func, args, kwargs, normalize_to_only_use_kwargs=True)
        return _attention_flops(packet.__name__, args[0], args[1], args[2], given.kwargs if given else {})
    if packet.__name__ == _FOUR_BIT:
        activations, _, (outputs, _), *_ = args
        return 2 * activations.numel() * int(outputs)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention_flops(name: str, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> int:
    """The flops of both products of attention; a causal mask leaves half of them.

    The table of torch knows neither causal masks nor the kernels of the CPU and of flash_attn. Of sequences in one row
    flash_attn is told the longest, and all count as that long.
    """
    keys = (given.get("max_seqlen_k") or key.shape[-3]) if name.startswith(_FLASH) else key.shape[-2]
    whole = 2 * query[..., 0].numel() * int(keys) * (query.shape[-1] + value.shape[-1])
    return whole // 2 if given.get("is_causal") or given.get("causal") else whole
